"""What SafeCheckpoint adds to a Lightning checkpoint, and what it checks before a fit goes on from one."""

import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

import torch

import lightning_tricks
from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, pl
from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import is_a
from lightning_tricks.checkpoints.other_weights import other_weights
from lightning_tricks.checkpoints.record import KEY, Record, record_of

_recipes: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # YAML by SaveConfigCallback


def content(trainer: Trainer, module: Module, record: Record) -> dict[str, Any]:
    """The value of `checkpoint[KEY]`, plain types.

    Its entries: `record`, the fields of a Record without checksums; `recipe`, the command line's settings as YAML, None
    in a run from Python; `versions`; `module`, the LightningModule's class. The checkpoints of version 0.1 also have
    `rng`, the random state of each rank, which now is the checkpoint's own entry: see `save_random_states`.
    """
    fields = asdict(record)
    del fields["checksums"]
    return {
        "record": fields,
        "recipe": recipe_of(trainer),
        "versions": versions(),
        "module": class_name(module),
    }


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
    """Have a checkpoint of another class or of other weights refused in one line, while Lightning restores a module.

    Raises:
        UsageError: at restoring: the module's class is not the one that was saved, nor a subclass of it; a key or a
            shape differs.
    """
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
    """Refuse a checkpoint of another class.

    Raises:
        UsageError: the module is neither of the class that was saved nor of a subclass of it.
    """
    saved = checkpoint.get(KEY, {}).get("module")
    if saved is None:
        return
    names = {saved}
    if record_of(checkpoint).version == 1:  # which has the name of the class that `fully_shard` gives
        names.add(saved.removeprefix("FSDP"))
    if not is_a(module, *names):
        raise UsageError(
            f"ckpt_path={path}: a {saved} saved this checkpoint, and this run trains a {class_name(module)}, so fit "
            f"cannot go on from it: give --init_from {path} to start anew with its weights (from Python: "
            "load_state_dict), or train the class that saved it"
        )
