"""Check that a path is a whole checkpoint before anything in it is unpickled; if it is not, say why in one line.

`check_checkpoint` looks at names, sizes and small files, `verify_checkpoint` at every byte.
"""

import zipfile
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import inside
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.folder_metadata import SHARDS_METADATA, read_metadata
from lightning_tricks.checkpoints.record import DAMAGED_ARCHIVE, RECORD_FILE, damage, read_record

TRAINER_STATE = "meta.pt"  # Lightning's file: everything but weights and optimizer state
_WEIGHTS_KEY = "state_dict"
_TRAINING_KEY = "lr_schedulers"  # a key of Lightning's that only a checkpoint of weights alone lacks


def check_checkpoint(path: str | Path, resumes: bool = False) -> Path:
    """Refuse a path that is no whole checkpoint; reads no tensor. Ranks that see the same files all refuse it or none.

    A file is whole when `torch.save` wrote it to its end. A folder of shards is whole when it has `.metadata`,
    `meta.pt` and every byte that `.metadata` names. A folder that this collection wrote also needs `record.json`, with
    whose checksums the first two agree. If a kill hit the moment in which a new checkpoint replaced an older one, the
    error names the path of the older one.

    Args:
        path: the value of `ckpt_path`; what is behind an address (`s3://...`) is fetched, see `fetch`.
        resumes: whether training shall go on from it, which needs more than weights.

    Returns:
        The path on this host.

    Raises:
        UsageError: nothing there; a folder that is incomplete, of DeepSpeed, of another program, or of something else;
            a file cut short or of another kind; one that holds weights only where `resumes`.
    """
    path = local_copy(path)
    if path.is_dir():
        _check_folder(path)
    elif path.is_file():
        _check_file(path)
    else:
        before = replaced_path(path)
        hint = f"; {before} is the one before it: rename it" if before.exists() else ""
        raise UsageError(f"ckpt_path={path}: there is no such file or folder{hint}")
    if resumes:
        check_names_weights(path)
        if not _names(path / TRAINER_STATE if path.is_dir() else path, _TRAINING_KEY):
            raise UsageError(_weights_only(path))
    return path


def check_names_weights(path: Path) -> None:
    """Refuse a file that torch can open but Lightning did not save; builds no object."""
    if path.is_file() and not _names(path, _WEIGHTS_KEY):
        raise no_weights(path)


def no_weights(path: Any) -> UsageError:
    """The refusal of what torch can open but Lightning did not save."""
    return UsageError(
        f"{path} holds no state_dict, so it is no checkpoint of Lightning: "
        "bare weights are loaded by module.load_state_dict(torch.load(...)) before training"
    )


def check_training_state(checkpoint: dict[str, Any], path: Any) -> None:
    """Refuse to go on training from a checkpoint, loaded from `path`, that holds weights only.

    Raises:
        UsageError: it has no state of schedulers, and so none of optimizers.
    """
    if _TRAINING_KEY not in checkpoint:
        raise UsageError(_weights_only(path))


def _weights_only(path: Any) -> str:
    return (
        f"ckpt_path={path}: it holds weights only and no optimizer state (save_weights_only), so fit cannot go on from "
        "it: give a complete checkpoint; validate, test, predict and load_from_checkpoint take this one"
    )


def _names(file: Path, key: str) -> bool:
    """Whether a file's pickle has the key, read as bytes: no object is built; True for torch's old format."""
    if not zipfile.is_zipfile(file):
        return True
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return key.encode() in archive.read(name)
    except DAMAGED_ARCHIVE as error:
        raise UsageError(f"damaged: {file} cannot be read ({error}): take an older checkpoint") from None


def replaced_path(path: Path) -> Path:
    """The path of the older checkpoint while a newer one replaces it."""
    return path.with_name(f".{path.name}.replaced")


def is_folder_of_shards(path: Path) -> bool:
    """Whether `path` is a folder in which torch's distributed checkpoints were, or were about to be, written."""
    names = (SHARDS_METADATA, TRAINER_STATE)
    return path.is_dir() and (any((path / name).exists() for name in names) or any(path.glob("*.distcp")))


def is_of_deepspeed(folder: Path) -> bool:
    """Whether DeepSpeed's engine wrote `folder`."""
    return (folder / "zero_to_fp32.py").exists() or any(folder.glob("**/*_model_states.pt"))


def _check_folder(folder: Path) -> None:
    if is_of_deepspeed(folder):
        raise UsageError(
            f"{folder} is a checkpoint of DeepSpeed: resume with the DeepSpeed strategy that wrote it, "
            "or make one file of its weights with `python -m lightning_tricks consolidate`"
        )
    if not is_folder_of_shards(folder):
        if (folder / "config.json").is_file():
            raise UsageError(
                f"{folder} is a folder of Hugging Face and no checkpoint: start a run from it with --init_from, or "
                "with the recipe that `python -m lightning_tricks import` writes"
            )
        raise UsageError(
            f"{folder} is a folder without a checkpoint: give the checkpoint itself, such as {folder}/last.ckpt"
        )
    for name, what in ((SHARDS_METADATA, "what its shards hold"), (TRAINER_STATE, "the Trainer's own state")):
        if not inside(folder, folder / name).is_file():
            raise UsageError(f"incomplete: {folder} has no {name} ({what}), so it was not written to its end")
    _check_record(folder)
    sizes: dict[str, int] = {}  # bytes that each file of shards must have at least
    for item in read_metadata(folder).storage_data.values():
        sizes[item.relative_path] = max(sizes.get(item.relative_path, 0), item.offset + item.length)
    for name, size in sizes.items():
        shard = folder / name
        there = shard.stat().st_size if shard.is_file() else 0
        if there < size:
            raise UsageError(f"incomplete: {shard} has {there:,} of {size:,} bytes")
    _check_zip(folder / TRAINER_STATE)


def _check_record(folder: Path) -> None:
    """Refuse a folder of ours without its record, which is written last, and damage in its two small files."""
    record = read_record(folder)
    if record is None:
        if read_record(folder / TRAINER_STATE) is not None:  # no other program gives that file one
            raise UsageError(
                f"incomplete: {folder} has no {RECORD_FILE} (the checksums of its files), so it was not written to its "
                "end, or not copied completely"
            )
        return
    small = {name: record.checksums[name] for name in (SHARDS_METADATA, TRAINER_STATE) if name in record.checksums}
    found = damage(folder, record, small)
    if found:
        raise UsageError(f"damaged: {found}: take an older checkpoint")


def _check_file(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        raise UsageError(f"incomplete: {path} is empty")
    if start[:2] == b"\x80\x02":  # torch.save before 1.6
        return
    if start != b"PK\x03\x04":
        if zipfile.is_zipfile(path):
            raise UsageError(
                f"damaged: {path} has other bytes at its start than were written: take an older checkpoint"
            )
        raise UsageError(f"{path} is no checkpoint: not a file that torch.save wrote")
    _check_zip(path)


def _check_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except DAMAGED_ARCHIVE:
        raise UsageError(f"incomplete: {path} ends too early, or its end is damaged") from None
    if not any(name.endswith("/data.pkl") for name in names):
        raise UsageError(f"{path} is no checkpoint: a zip archive of something else")


# ---- every byte


def verify_checkpoint(path: str | Path, resumes: bool = False) -> Path:
    """Refuse a path that is no whole checkpoint, or whose bytes have changed; unpickles nothing of a file.

    A checkpoint of this collection, file or folder, is compared with its record. In a file of `torch.save` alone, the
    archive's own checksum of each tensor is compared. A folder of shards without a record, and a file of torch before
    version 1.6, have no checksums: they are checked as by `check_checkpoint`.

    Takes and returns what `check_checkpoint` does.

    Raises:
        UsageError: what `check_checkpoint` raises; other bytes than were written; a checkpoint of a newer version.
    """
    checked = check_checkpoint(path, resumes)
    check_bytes(checked)
    return checked


def check_bytes(path: Path) -> None:
    """The second half of `verify_checkpoint`, for a path that `check_checkpoint` has passed.

    Raises:
        UsageError: other bytes than were written; a checkpoint of a newer version.
    """
    while True:
        before = path.stat()
        found = damage(path, read_record(path))
        after = path.stat()
        if not found or (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns):
            break  # otherwise a newer checkpoint has taken the name while this one was read
    if found:
        raise UsageError(f"damaged: {found}: take an older checkpoint")


def identity(path: str | Path | None) -> list[int]:
    """Numbers that change when a checkpoint is replaced or rewritten: file number, size and time of writing.

    Of a folder of shards, those of the file in it that is written last.
    """
    if path is None:
        return []
    place = Path(path)
    names = (RECORD_FILE, SHARDS_METADATA, "latest") if place.is_dir() else ()
    file = next((place / name for name in names if (place / name).is_file()), place)
    try:
        state = file.stat()  # not after a look whether it exists: a save in the background removes old ones meanwhile
    except FileNotFoundError:
        return []
    return [state.st_ino, state.st_size, state.st_mtime_ns]
