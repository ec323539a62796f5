"""Read torch's folders of shards without running what is pickled in them.

torch reads `.metadata` with plain `pickle` and every entry that is no tensor with `weights_only=False`, and each of the
two runs what the file says. Here `.metadata` may hold the classes that describe tensors and nothing else.
"""

import enum
import io
import pickle
import posixpath
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import inside

SHARDS_METADATA = ".metadata"  # torch's file: which tensor is in which file; written last by torch
_DCP, _LEGACY = "torch.distributed.checkpoint", "torch.distributed._shard.sharded_tensor.metadata"
# The classes and functions that torch's folders of FSDP2, FSDP1 and plain tensors name; calling one runs nothing else.
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_DCP}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (_LEGACY, "TensorProperties"),
    (_LEGACY, "MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the objects that describe shards, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _ALLOWED:
            raise _RefusedError(f"{module}.{name}")
        if name in ("PosixPath", "WindowsPath"):  # where the folder was saved, perhaps on another system
            return posixpath.join
        return super().find_class(module, name)


class _RefusedError(Exception):
    """A pickle asks for a class that has no place in it."""


def _member(cls: Any, name: str) -> Any:
    """In place of `getattr`, by which Python 3.11.0 to 3.11.3 pickles a member of an enum; for such members alone."""
    if isinstance(cls, enum.EnumMeta) and name in cls.__members__:
        return cls[name]
    raise _RefusedError("builtins.getattr")


def read_metadata(folder: Path) -> Any:
    """Torch's description of a folder of shards.

    Raises:
        UsageError: it is damaged, or asks for something that describes no tensor, which is then not run.
    """
    path = folder / SHARDS_METADATA
    try:
        metadata = _MetadataUnpickler(io.BytesIO(inside(folder, path).read_bytes())).load()
        files = {Path(item.relative_path) for item in metadata.storage_data.values()}
        keys = (metadata.planner_data or metadata.state_dict_metadata).keys() ^ metadata.state_dict_metadata.keys()
    except _RefusedError as error:
        raise UsageError(
            f"{path} asks for {error}, which no description of tensors needs and which may run any program: "
            "it was not opened; take a checkpoint that you trust"
        ) from None
    except (OSError, UsageError):
        raise
    except Exception as error:  # a damaged pickle raises errors of any class
        raise UsageError(f"incomplete: {path} cannot be read ({type(error).__name__})") from None
    if keys:
        raise UsageError(f"incomplete: {path} says nothing of '{min(keys)}', so it would be left out")
    for file in files:
        if file.is_absolute() or ".." in file.parts:
            raise UsageError(f"{path} names {file}, which is outside of the folder: take a checkpoint that you trust")
        inside(folder, folder / file)
    return metadata


class SafeReader(FileSystemReader):
    """Torch's reader of shards, with the `.metadata` that `read_metadata` has read."""

    def __init__(self, folder: Path, metadata: Any) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The metadata that was read already."""
        return self._metadata


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner for a flat dict, which reads what is no tensor by `torch.load(weights_only=...)`."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one object into the state dict."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self.weights_only)
