"""Is a path a whole checkpoint? One line where it is not, from names and sizes alone, before anything waits."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from lightning_tricks._errors import UsageError

SHARDS_METADATA = ".metadata"  # torch's: which tensor is where; written last
REST = "meta.pt"  # Lightning's: all that is not weights or optimizer state
_TRAINING_STATE = "lr_schedulers"  # Lightning's key that is there, also empty, unless only the weights were saved


def check_checkpoint(path: str | Path, resumes: bool = False) -> Path:
    """Refuse what cannot be resumed from; reads no tensor. The same on every rank that sees the same files.

    A folder of shards is whole when `.metadata` and `meta.pt` are there and every byte that `.metadata` names. A file
    is one that `torch.save` wrote to its end. Where a kill hit the moment in which a new checkpoint took an older
    one's place, the line names where the older one is.

    Args:
        path: what `ckpt_path` was given; anything with a protocol (`s3://...`) is left to whoever reads it.
        resumes: whether training shall go on from it, which needs more than weights.

    Returns:
        The path.

    Raises:
        UsageError: nothing there; a folder that is incomplete, of DeepSpeed, of another program, or of something else;
            a file cut short or of another kind; one that holds weights only where `resumes`.
    """
    if "://" in str(path):
        return Path(path)
    path = Path(path)
    if path.is_dir():
        _check_folder(path)
    elif path.is_file():
        _check_file(path)
    else:
        before = replaced(path)
        hint = f"; {before} is the one before it: rename it" if before.exists() else ""
        raise UsageError(f"ckpt_path={path}: there is no such file or folder{hint}")
    if resumes and not _names_training_state(path / REST if path.is_dir() else path):
        raise UsageError(_weights_only(path))
    return path


def check_training_state(checkpoint: dict[str, Any], path: Any) -> None:
    """Refuse to train on from a checkpoint, loaded from `path`, that holds weights only.

    Raises:
        UsageError: it has no state of schedulers, and so none of optimizers.
    """
    if _TRAINING_STATE not in checkpoint:
        raise UsageError(_weights_only(path))


def _weights_only(path: Any) -> str:
    return (
        f"ckpt_path={path}: it holds weights only and no optimizer state (save_weights_only), so fit cannot go on from "
        "it: give a checkpoint that was saved whole; validate, test, predict and load_from_checkpoint take this one"
    )


def _names_training_state(file: Path) -> bool:
    """Whether a file's pickle has the key, read as bytes: no object is built; True for torch's old format."""
    if not zipfile.is_zipfile(file):
        return True
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return _TRAINING_STATE.encode() in archive.read(name)


def replaced(path: Path) -> Path:
    """Where a checkpoint waits while a newer one takes its place."""
    return path.with_name(f".{path.name}.replaced")


def is_folder_of_shards(path: Path) -> bool:
    """Whether `path` is a folder in which torch's distributed checkpoints were, or were about to be, written."""
    return path.is_dir() and (any((path / name).exists() for name in (SHARDS_METADATA, REST)) or _has_shards(path))


def is_of_deepspeed(folder: Path) -> bool:
    """Whether `folder` is one that DeepSpeed's engine wrote."""
    return (folder / "zero_to_fp32.py").exists() or any(folder.glob("**/*_model_states.pt"))


def _has_shards(folder: Path) -> bool:
    return any(folder.glob("*.distcp"))


def _check_folder(folder: Path) -> None:
    if is_of_deepspeed(folder):
        raise UsageError(
            f"{folder} is a checkpoint of DeepSpeed: resume with the DeepSpeed strategy that wrote it, "
            "or make one file of its weights with `python -m lightning_tricks consolidate`"
        )
    if not is_folder_of_shards(folder):
        raise UsageError(
            f"{folder} is a folder without a checkpoint: give the checkpoint itself, such as {folder}/last.ckpt"
        )
    for name, what in ((SHARDS_METADATA, "what its shards hold"), (REST, "the Trainer's own state")):
        if not (folder / name).is_file():
            raise UsageError(f"incomplete: {folder} has no {name} ({what}), so it was not written to its end")
    for name, size in _sizes(folder).items():
        shard = folder / name
        there = shard.stat().st_size if shard.is_file() else 0
        if there < size:
            raise UsageError(f"incomplete: {shard} has {there:,} of {size:,} bytes")
    _check_zip(folder / REST)


def read_metadata(folder: Path) -> Any:
    """Torch's description of a folder of shards.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return FileSystemReader(folder).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
        raise UsageError(f"incomplete: {folder}/{SHARDS_METADATA} cannot be read ({type(error).__name__})") from None


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes that each file of shards must have at least."""
    sizes: dict[str, int] = {}
    for item in read_metadata(folder).storage_data.values():
        sizes[item.relative_path] = max(sizes.get(item.relative_path, 0), item.offset + item.length)
    return sizes


def _check_file(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] == b"\x80\x02":  # torch.save before 1.6
        return
    if start != b"PK\x03\x04":
        raise UsageError(f"{path} is no checkpoint: not a file that torch.save wrote")
    _check_zip(path)


def _check_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                raise UsageError(f"{path} is no checkpoint: a zip archive of something else")
    except zipfile.BadZipFile:
        raise UsageError(f"incomplete: {path} ends too early") from None
