"""The LightningModule and its optimizers."""

from typing import Any

from lightning_tricks._trainer.package import is_a, lightning_file


def trainer_of(module: Any) -> Any:
    """The Trainer that a LightningModule is attached to; None for one that is not, and for any other module.

    Read from `LightningModule.trainer` (core/module.py), which raises where there is none.
    """
    return getattr(module, "_trainer", None)


def configured_optimizers(module: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and scheduler configurations that `configure_optimizers` returns, each in a list, checked.

    Read from `_init_optimizers_and_lr_schedulers` (core/optimizer.py), which makes up a `_MockOptimizer` for a module
    that has none; here the list is empty.
    """
    optimizer = lightning_file(module.trainer, "core.optimizer")
    optimizers, schedulers = optimizer._init_optimizers_and_lr_schedulers(module)
    return [found for found in optimizers if not is_a(found, "_MockOptimizer")], schedulers


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a LightningOptimizer, or the one given (core/optimizer.py).

    Asks for the class: optimizers such as Lookahead have an attribute `optimizer` of their own.
    """
    return optimizer.optimizer if is_a(optimizer, "LightningOptimizer") else optimizer


def optimizer_index(trainer: Any, optimizer: Any) -> int:
    """Index of an optimizer, wrapped or not, among the Trainer's."""
    inner = unwrapped(optimizer)
    return next(i for i, other in enumerate(trainer.optimizers) if unwrapped(other) is inner)


def clip_hook(trainer: Any) -> tuple[Any, str]:
    """Owner and name of the method between the hooks `on_before_optimizer_step` and each step, which calls the clip.

    In manual optimization too, where it clips nothing. It gets the module and the optimizer. Read from
    `Precision._after_closure` and `_clip_gradients` (plugins/precision/precision.py).
    """
    return trainer.precision_plugin, "_clip_gradients"


def compiled_steps(module: Any) -> dict[str, Any] | None:
    """The steps of a LightningModule from before `torch.compile(module)`; None where it is not compiled.

    Read from `from_compiled` (utilities/compile.py).
    """
    return getattr(module, "_compiler_ctx", None)


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Let `LightningModule.device_mesh` answer, as ModelParallelStrategy does (strategies/model_parallel.py)."""
    module._device_mesh = mesh
