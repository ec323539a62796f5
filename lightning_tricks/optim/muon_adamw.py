"""Muon for the hidden matrices of a model, AdamW for the rest, in one optimizer."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim.composed_optimizer import ComposedOptimizer, Factory
from lightning_tricks.optim.matrix_layout import MatrixLayout
from lightning_tricks.optim.muon import Muon

__all__ = ["MatrixAdamW", "MuonAdamW"]

_LISTS = ("params", "param_names", "roles", "layouts")  # of a group, one entry a parameter


def split_by_role(group: Any, first: str, takes: Callable[[str, Tensor], bool], owner: str) -> Iterator[dict[str, Any]]:
    """The parts of a group that go to the optimizer named `first` and to the one named `adamw`, without empty ones.

    Args:
        group: of `decay_groups`; the optimizer that its rule names has all of it.
        first: name of the optimizer for hidden matrices.
        takes: of (role, parameter), whether the first optimizer steps it.
        owner: name of the class, for errors.

    Raises:
        UsageError: a group without roles; a rule that names another optimizer.
    """
    if not isinstance(group, dict) or "roles" not in group:
        raise UsageError(f"{owner}: its groups do not tell the role of each parameter: make them by decay_groups")
    chosen, names = group.get("optimizer"), (first, "adamw")
    if chosen not in (None, *names):
        raise UsageError(f"param_rules: optimizer={chosen!r} of {group['name']}: {owner} has {' and '.join(names)}")
    pairs = zip(group["roles"], group["params"], strict=True)
    by_role = [first if takes(role, param) else "adamw" for role, param in pairs]
    goes_to = by_role if chosen is None else [chosen] * len(by_role)
    for name in names:
        entries = [index for index, optimizer in enumerate(goes_to) if optimizer == name]
        if entries:
            lists = {key: [group[key][index] for index in entries] for key in _LISTS}
            yield {**group, **lists, "optimizer": name, "name": f"{name}:{group['name']}"}


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


_HIDDEN = ("matrix", "expert")


class MuonAdamW(ComposedOptimizer):
    """Muon for hidden matrices and experts; AdamW for embeddings, heads, routers, norms, biases and other vectors.

    The role of each parameter comes from `decay_groups`; a rule with `optimizer: adamw` or `muon` decides first. Muon's
    updates are scaled to the size of AdamW's, so that one `lr` and one decay, those of AdamW, fit both; not so with
    `muon_lr`. Each group is split in two, named `muon:decay`, `adamw:decay`, and so on.

    Args:
        params: groups of `decay_groups`.
        lr: of AdamW, and of Muon unless it has its own. 3e-4 as `default_adamw`.
        muon_lr: of Muon, whose updates then have their original scale; 0.02 in the first source. None: `lr`.
        betas: of AdamW.
        eps: of AdamW.
        momentum: of Muon.
        momentum_warmup_steps: steps over which it rises from 0.85; 0 for none.
        cautious_weight_decay: matrices decay only where the update moves a weight towards 0.
        head_dim: orthogonalize the rows of each attention head by themselves in the projections to queries, keys and
            values. None: each projection as a whole.
        fused: AdamW's single kernel for all of its parameters.

    Raises:
        UsageError: groups without roles; a fused projection whose rows are unknown; a model without hidden matrices; a
            Tensor as learning rate; an error of Muon.

    Source: Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/ (which parameters); Liu et al. 2025
        (Moonlight), https://arxiv.org/abs/2502.16982 (one learning rate).
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 3e-4,
        muon_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        momentum_warmup_steps: int = 0,
        cautious_weight_decay: bool = False,
        head_dim: int | None = None,
        fused: bool = True,
    ) -> None:
        if isinstance(lr, torch.Tensor) or isinstance(muon_lr, torch.Tensor):
            raise UsageError("MuonAdamW.lr is a Tensor: give a float, which the schedule sets at each step")
        self._head_dim = head_dim
        groups = [part for group in params for part in self._parts(group)]

        def muon(own: Iterable) -> Muon:
            scale: Any = "match_rms_adamw" if muon_lr is None else "original"
            rate = lr if muon_lr is None else muon_lr
            return Muon(own, rate, momentum, adjust_lr_fn=scale, momentum_warmup_steps=momentum_warmup_steps,
                        cautious_weight_decay=cautious_weight_decay)  # fmt: skip

        def adamw(own: Iterable) -> torch.optim.AdamW:
            return torch.optim.AdamW(own, lr=lr, betas=betas, eps=eps, fused=fused)

        if not any(group["optimizer"] == "muon" for group in groups):
            raise UsageError("MuonAdamW: the model has no hidden matrix for Muon: take torch.optim.AdamW")
        names = {group["optimizer"] for group in groups}
        super().__init__(groups, {name: make for name, make in (("muon", muon), ("adamw", adamw)) if name in names})

    def _parts(self, group: Any) -> Iterator[dict[str, Any]]:
        """The parts of a group that go to Muon and to AdamW."""
        for part in split_by_role(group, "muon", _is_hidden, "MuonAdamW"):
            if part["optimizer"] == "muon":
                entries = zip(part["params"], part["param_names"], part["layouts"], strict=True)
                part["layouts"] = [self._layout(*entry) for entry in entries]
            yield part

    def _layout(self, param: torch.Tensor, name: str, saved: dict[str, Any] | None) -> dict[str, Any]:
        """The layout of a parameter that goes to Muon, with one part for each head where `head_dim` asks for it."""
        layout = MatrixLayout.from_plain(saved, param.shape)
        if layout.parts is None:
            raise UsageError(
                f"MuonAdamW: '{name}' seems to hold several projections, of rows that nobody knows: name them in a "
                "dict _matrices of its module, or write a rule with optimizer: adamw for it"
            )
        return (layout if self._head_dim is None else layout.by_heads(self._head_dim, name)).plain


def _is_hidden(role: str, param: torch.Tensor) -> bool:
    return role in _HIDDEN and not param.is_complex()
