"""Open a checkpoint of one file, or refuse it in one line that says why it cannot be opened."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.check_checkpoint import no_weights
from lightning_tricks.checkpoints.verify_checkpoint import verify_checkpoint

# Errors of torch's unpickler, besides UnpicklingError, on bytes that torch.save did not write.
_UNREADABLE = (RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError, ImportError)


def read_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """A checkpoint of Lightning, with every byte checked first; its tensors are on the CPU, mapped from the file.

    Raises:
        UsageError: see `verify_checkpoint`, `load_file` and `check_content`.
    """
    checkpoint = load_file(verify_checkpoint(path), weights_only)
    check_content(checkpoint, path)
    return checkpoint


def load_file(path: Path, weights_only: bool | None, map_location: Any = "cpu", mmap: bool = True) -> Any:
    """`torch.load` of a file that was checked.

    Args:
        path: the file.
        weights_only: as in `torch.load`: None stands for True, unless TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 is set.
        map_location: as in `torch.load`.
        mmap: whether a tensor's values are read when they are first needed; the disk space of a file that is deleted
            comes free when no tensor needs it any more.

    Raises:
        UsageError: an object that `weights_only` refuses, naming its class; a file that torch cannot open.
    """
    try:
        mmap = mmap and zipfile.is_zipfile(path)
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise refused_object(path, error) from None
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"damaged: {path} cannot be opened ({type(error).__name__}: {reason})") from error


def check_weights(checkpoint: Any, path: Any) -> None:
    """Refuse what torch can open but holds no weights by name.

    Raises:
        UsageError: see above.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise no_weights(path)


def check_content(checkpoint: Any, path: Any) -> None:
    """Refuse what torch can open but Lightning did not save.

    Raises:
        UsageError: it has no weights, or not the mark of Lightning's version.
    """
    check_weights(checkpoint, path)
    if "pytorch-lightning_version" not in checkpoint:
        raise UsageError(
            f"{path} lacks 'pytorch-lightning_version', so it is no whole checkpoint of Lightning: give the file "
            "that a run saved, unchanged"
        )


def refused_object(path: Any, error: pickle.UnpicklingError) -> UsageError:
    """Torch's refusal of an object, in one line that names the object's class and the way to let it in."""
    return UsageError(
        f"{path} holds {refused_class(error) or 'objects'}, which weights_only=True does not let in: if you trust "
        "it, load with weights_only=False, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 under a strategy that ignores it"
    )


def refused_class(error: pickle.UnpicklingError) -> str | None:
    """The class or function that torch's refusal names."""
    found = re.search(r"GLOBAL ([\w.]+)|<class '([\w.]+)'>", str(error))
    return (found[1] or found[2]) if found else None
