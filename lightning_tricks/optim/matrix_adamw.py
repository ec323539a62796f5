"""Any optimizer for the hidden matrices of a model, AdamW for the rest, in one optimizer."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks.optim.composed_optimizer import ComposedOptimizer, Factory
from lightning_tricks.optim.split_by_role import split_by_role


class MatrixAdamW(ComposedOptimizer):
    """An optimizer of your choice for hidden matrices; AdamW for embeddings, heads, norms, biases and other vectors.

    For optimizers that use the rows and columns of a matrix, such as SOAP, Shampoo and NorMuon: for an embedding or a
    head, some would keep a square matrix as wide as the vocabulary. Stacks of experts go to AdamW, because libraries
    treat a stack as one matrix. A rule with `optimizer: matrices` or `adamw` decides first. Each group is split in two,
    named `matrices:decay`, `adamw:decay`, and so on. Groups of matrices have a key `use_muon`, which those optimizers
    of pytorch_optimizer require that orthogonalize.

    Args:
        params: groups of `decay_groups`.
        matrices: makes the optimizer of the hidden matrices from groups; its learning rate is its own.
        lr: of AdamW. 3e-4 as `default_adamw`.
        betas: of AdamW.
        eps: of AdamW.
        fused: AdamW's single kernel for all of its parameters.

    Raises:
        UsageError: groups without roles; a rule that names another optimizer; a model without hidden matrices.

    Source: Vyas et al. 2024 (SOAP), https://arxiv.org/abs/2409.11321, and Keller Jordan 2024 (Muon),
        https://kellerjordan.github.io/posts/muon/, which leave embeddings and heads to AdamW.
    """

    def __init__(
        self,
        params: Iterable,
        matrices: Factory,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = True,
    ) -> None:
        owner = type(self).__name__
        groups = [part for group in params for part in split_by_role(group, "matrices", _is_matrix, owner)]
        names = {group["optimizer"] for group in groups}
        if "matrices" not in names:
            raise UsageError(f"{owner}: the model has no hidden matrix: take torch.optim.AdamW")
        for group in groups:
            if group["optimizer"] == "matrices":
                group["use_muon"] = True

        def adamw(own: Iterable) -> torch.optim.AdamW:
            return torch.optim.AdamW(own, lr=lr, betas=betas, eps=eps, fused=fused)

        made = {"matrices": matrices, "adamw": adamw}
        super().__init__(groups, {name: make for name, make in made.items() if name in names})


def _is_matrix(role: str, param: Tensor) -> bool:
    return (role == "matrix" or (role == "expert" and param.ndim == 2)) and not param.is_complex()
