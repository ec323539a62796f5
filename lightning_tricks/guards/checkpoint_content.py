"""What SafeCheckpoint adds to a Lightning checkpoint: its record, score, recipe, versions; and the check at a load.

A checkpoint of another class, or of other weights, is refused before a fit goes on from it. The record says whether the
numbers of the module are finite.
"""

import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

import lightning_tricks
from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.replaced import replaced
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks._core.tensors import local
from lightning_tricks._trainer.lightning import Module, Trainer, WarnOnce, pl
from lightning_tricks._trainer.objects import is_a
from lightning_tricks.checkpoints.load_weights import other_weights
from lightning_tricks.checkpoints.record import KEY, Record

_COUNTS = {"epoch": "current_epoch", "step": "global_step"}  # always there, by the Trainer's attribute
_RUNNING_STATISTICS = ("running_mean", "running_var")  # of every kind of batch and instance normalization
_recipes: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # YAML by SaveConfigCallback


def content(trainer: Trainer, module: Module, record: Record) -> dict[str, Any]:
    """The value of `checkpoint[KEY]`, plain types.

    Its entries: `record`, the fields of a Record without checksums; `recipe`, the command line's settings as YAML, None
    in a run from Python; `versions`; `module`, the LightningModule's class.
    """
    fields = asdict(record)
    del fields["checksums"]
    return {"record": fields, "recipe": recipe_of(trainer), "versions": versions(), "module": class_name(module)}


def class_name(module: Module) -> str:
    """The name of the user's class: `fully_shard` gives a module a class of torch, a subclass named `FSDP...`."""
    return next(cls.__name__ for cls in type(module).__mro__ if not cls.__module__.startswith("torch."))


def recipe_of(trainer: Trainer) -> str | None:
    """The settings of a run of LightningCLI, as it saves them in `config.yaml`.

    They are the same at every save of a run, and jsonargparse takes a fifth of a second to write them.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if is_a(callback, "SaveConfigCallback"):
            if callback not in _recipes:
                _recipes[callback] = str(callback.parser.dump(callback.config, skip_none=False))
            return _recipes[callback]
    return None


def versions() -> dict[str, str]:
    """The versions that wrote a checkpoint."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": str(pl.__version__),
        "lightning_tricks": lightning_tricks.__version__,
    }


@contextmanager
def refusing_other_modules(trainer: Trainer, module: Module) -> Iterator[None]:
    """Have a checkpoint of another class or of other weights refused in one line, while Lightning restores a module."""
    on_load, load = module.on_load_checkpoint, module.load_state_dict

    def checked_on_load(checkpoint: dict[str, Any]) -> None:
        check_class(checkpoint, module, trainer.ckpt_path)
        on_load(checkpoint)

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        except RuntimeError as error:
            if line := other_weights(str(error), trainer.ckpt_path):
                raise UsageError(line) from error
            raise

    with ExitStack() as stack:
        stack.enter_context(replaced(module, "on_load_checkpoint", checked_on_load))
        stack.enter_context(replaced(module, "load_state_dict", load_weights))
        yield


def check_class(checkpoint: Mapping[str, Any], module: Module, path: Any) -> None:
    """Refuse a checkpoint if the module is neither of the class that was saved nor of a subclass of it."""
    saved = checkpoint.get(KEY, {}).get("module")
    if saved is not None and not is_a(module, saved):
        raise UsageError(
            f"ckpt_path={path}: a {saved} saved this checkpoint, and this run trains a {class_name(module)}, so fit "
            f"cannot go on from it: give --init_from {path} to start a new run with its weights (from Python: "
            "load_state_dict), or train the class that saved it"
        )


class FreshScore:
    """Reads a logged metric at a save, if it was logged for the weights that are saved.

    Lightning keeps the values of the last validation, which may be many steps old.

    Args:
        monitor: name of the metric, or `epoch` or `step`; None for no score.
    """

    def __init__(self, monitor: str | None) -> None:
        self.monitor = monitor
        self._validated: tuple[int, float | None] | None = None  # step and value of the last validation
        self._warn_once = WarnOnce()

    def after_validation(self, trainer: Any) -> None:
        """Take note of the metric's value and of its step."""
        self._validated = (trainer.global_step, self._logged(trainer))

    def read(self, trainer: Any) -> float | None:
        """The score of the weights as they are; None where there is none, which is said once.

        Raises:
            UsageError: a validation has run, and no such metric is logged.
        """
        if self.monitor is None:
            return None
        value = self._logged(trainer)
        if self.monitor in _COUNTS:
            return value
        if value is None and self._validated and self.monitor not in trainer.callback_metrics:
            near = did_you_mean(self.monitor, list(trainer.callback_metrics))
            raise UsageError(f"SafeCheckpoint: monitor={self.monitor}: the run logs no such metric{near}")
        step = trainer.global_step
        stale = self._validated is not None and self._validated[0] != step and self._validated[1] == value
        if value is not None and not stale:
            return value
        if not stale and self.monitor in trainer.callback_metrics:
            number = float(trainer.callback_metrics[self.monitor])
            self._warn_once(
                "not finite",
                f"SafeCheckpoint: {self.monitor} is {number} at step {step}: such a checkpoint cannot be the best",
            )
        else:
            self._warn_once(
                "stale",
                f"SafeCheckpoint: {self.monitor} has no value for the weights of step {step}, so this checkpoint and "
                "later ones like it cannot be the best: let every_n_train_steps be a multiple of the steps between "
                "validations, and max_steps too",
            )
        return None

    def _logged(self, trainer: Any) -> float | None:
        value = trainer.callback_metrics.get(self.monitor)
        if self.monitor in _COUNTS:  # as ModelCheckpoint does, also where they are not logged
            return float(int(getattr(trainer, _COUNTS[self.monitor]) if value is None else value))
        return float(value) if value is not None and math.isfinite(value) else None


# ---- whether the numbers of a module are finite, decided on their device


def numbers_of(module: nn.Module) -> Iterator[Tensor]:
    """What must be finite in a module: its parameters and running statistics. Masks may hold infinities by design."""
    yield from module.parameters()
    for name, buffer in module.named_buffers():
        if name.rpartition(".")[2] in _RUNNING_STATISTICS:
            yield buffer


def not_finite(numbers: Iterable[Tensor]) -> Tensor:
    """1.0 where one of this process's numbers is NaN or infinite, else 0.0; shape (), on their device.

    Of a DTensor or of a weight that DeepSpeed has partitioned, the part on this rank counts; add the values of all
    ranks.
    """
    # the largest absolute value: a norm that cannot overflow where no number is infinite, and that is NaN if one is NaN
    norm = get_total_norm(_parts(numbers), norm_type=float("inf"))
    return 1.0 - norm.isfinite().float()


@torch.no_grad()
def _parts(numbers: Iterable[Tensor]) -> list[Tensor]:
    """The numbers on this rank, each as a real tensor; not those of one byte, nor of sparse and nested tensors."""
    parts = []
    for number in numbers:
        if is_lazy(number):  # it has none yet
            continue
        part = local(getattr(number, "ds_tensor", number)).detach()
        if part.is_nested or part.layout != torch.strided or part.itemsize == 1 or part.numel() == 0:
            continue
        part = torch.view_as_real(part) if part.is_complex() else part
        if part.is_floating_point():
            parts.append(part)
    return parts
