"""The rows of the table over optimizers: each optimizer as a recipe names it, and the module that Sophia needs."""

import importlib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_tricks import LanguageModel
from lightning_tricks.optim import build_optimizer

Spec = dict[str, Any]


class TwiceDifferentiable(LanguageModel):
    """Gives second derivatives every tenth step, which Sophia estimates the curvature from.

    The loss comes from whole logits, as that in slices has first derivatives only; attention is computed by matrix
    products, as its fused kernels have first derivatives only.
    """

    def token_sums(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, labels = self(batch["input_ids"]).float(), batch["labels"]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(create_graph=self.trainer.global_step % 10 == 0)


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        optimizer: as in a recipe.
        needs: the package that it needs.
        period: after how many steps its work repeats.
        module: what is trained; must give the derivatives that the optimizer needs.
    """

    optimizer: Spec
    needs: str = "torch"
    period: int = 1
    module: type[LanguageModel] = LanguageModel

    @property
    def missing(self) -> str | None:
        """The package, where this machine has not got it."""
        return None if find_spec(self.needs) else self.needs


def spec(class_path: str, **init_args: Any) -> Spec:
    return {"class_path": class_path, "init_args": init_args}


def matrices(adamw_lr: float, class_path: str, **init_args: Any) -> Spec:
    return spec("MatrixAdamW", matrices=spec(class_path, **init_args), lr=adamw_lr)


# Learning rates are not tuned: those of AdamW in the recipe where updates are as large, else what the authors advise.
ROWS = {
    "AdamW": Row(spec("AdamW", lr=2e-3, betas=[0.9, 0.95], fused=True)),
    "SGD": Row(spec("SGD", lr=0.2, momentum=0.9, nesterov=True)),
    "Adafactor": Row(spec("Adafactor", lr=2e-2)),
    "Lion": Row(spec("pytorch_optimizer.Lion", lr=2e-4, betas=[0.9, 0.99]), "pytorch_optimizer"),
    "SophiaH": Row(
        spec("pytorch_optimizer.SophiaH", lr=2e-2, p=5e-2), "pytorch_optimizer", 10, TwiceDifferentiable
    ),
    "AdamW8bit": Row(spec("torchao.optim.AdamW8bit", lr=2e-3, betas=[0.9, 0.95]), "torchao"),
    "MuonAdamW": Row(spec("MuonAdamW", lr=2e-3, momentum_warmup_steps=50)),
    "NorMuon": Row(
        matrices(2e-3, "pytorch_optimizer.NorMuon", lr=2e-3, update_scale="match_rms"), "pytorch_optimizer"
    ),
    "SOAP": Row(matrices(2e-3, "pytorch_optimizer.SOAP", lr=2e-3, betas=[0.95, 0.95]), "pytorch_optimizer", 10),
    "SOAP (heavyball)": Row(
        matrices(2e-3, "heavyball.SOAP", lr=2e-3, precondition_frequency=10, max_precond_dim=1024), "heavyball", 10
    ),
    "Shampoo": Row(
        matrices(2e-3, "pytorch_optimizer.Shampoo", lr=2e-2, preconditioning_compute_steps=10),
        "pytorch_optimizer", 10,
    ),
}  # fmt: skip


def importable(class_path: str) -> Any:
    """A class by its path, or by the short name that a recipe may give."""
    package, _, name = class_path.rpartition(".")
    for module in [package] if package else ["lightning_tricks", "torch.optim"]:
        imported = importlib.import_module(module)
        if module == "heavyball":  # on a CPU it would compile for minutes
            imported.utils.compile_mode = None
        if hasattr(imported, name):
            return getattr(imported, name)
    raise ValueError(f"{class_path}: no such class")


def factory(chosen: Spec, **others: Any) -> Callable[[Iterable], torch.optim.Optimizer]:
    """The function that a recipe with this optimizer gives to the module.

    Args:
        chosen: class path and arguments.
        **others: arguments in place of those.
    """
    arguments = {
        name: factory(value) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value
        for name, value in {**chosen["init_args"], **others}.items()
    }
    cls = importable(chosen["class_path"])
    return lambda groups: cls(groups, **arguments)


def built(name: str, module: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a row for a module, with decay groups."""
    return build_optimizer(module, factory(ROWS[name].optimizer))
