"""Write tensors to safetensors files one after the other: the process never holds more than one of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError

INDEX = "model.safetensors.index.json"
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Entry:
    """A tensor that is written.

    Args:
        name: in the file.
        shape: of the tensor.
        dtype: of the tensor.
        build: gives the tensor; called once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def data(self) -> Any:
        """The tensor's bytes, row by row, as an array of numpy.

        Raises:
            UsageError: it is not of this shape and dtype.
        """
        tensor = self.build()
        if (tuple(tensor.shape), tensor.dtype) != (self.shape, self.dtype):
            raise UsageError(
                f"export: {self.name} is {tuple(tensor.shape)} in {tensor.dtype} in the checkpoint, and its "
                f"decoder_config says {self.shape} in {self.dtype}: take another copy of the checkpoint"
            )
        return tensor.detach().contiguous().flatten().view(torch.uint8).numpy()


def write_weights(entries: Sequence[Entry], folder: Path, file_bytes: int) -> list[Path]:
    """Write tensors as transformers does: one file, or several of at most `file_bytes` and an index of them.

    A tensor that is larger than `file_bytes` has a file of its own. safetensors' own writer takes all tensors of a file
    at once, so the files are written here, a tensor at a time. torch's `HuggingFaceStorageWriter` writes the same
    files, of a state dict that its processes hold whole; see the page of `export` for the memory of both.

    Source: the format, https://github.com/huggingface/safetensors#format.
    """
    from huggingface_hub.serialization import split_state_dict_into_shards_factory  # comes with transformers

    by_name = {entry.name: entry for entry in entries}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda entry: entry.size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=file_bytes,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file_name, names in split.filename_to_tensors.items():
        with (folder / file_name).open("wb") as file:
            _write_file([by_name[name] for name in names], file)
    return [folder / name for name in split.filename_to_tensors]


def _write_file(entries: Sequence[Entry], file: IO[bytes]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    begin = 0
    for entry in entries:
        offsets = [begin, begin + entry.size]
        header[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
        begin += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8 bytes
    file.write(len(text).to_bytes(8, "little") + text)
    for entry in entries:
        file.write(entry.data().data)
