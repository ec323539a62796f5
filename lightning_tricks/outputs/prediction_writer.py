"""Write the predictions of `predict_step` to a file, batch by batch."""

import json
import math
from collections.abc import Mapping
from datetime import date
from pathlib import Path, PurePath
from typing import Any, TextIO

import torch
from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, pl, rank_zero_info
from lightning_tricks._trainer import data_rank


def rows_of(prediction: Any) -> list[Any]:
    """One entry in plain types for each row of a batch: along the first dimension of a tensor, or of several tensors.

    A dict, list or tuple with tensors gives rows of the same form. In it, a list beside the tensors has an entry for
    each row; a value without rows, such as a number, a text or a tensor without dimensions, is in each row. A list of
    dicts gives a row for each dict. Anything else that `predict_step` may return is one row. NaN and infinities become
    None.

    Raises:
        UsageError: the parts of a dict, list or tuple have different numbers of rows; a value that JSON cannot hold.
    """
    rows = _rows(prediction)
    return [_plain(prediction)] if rows is None else rows


def _rows(value: Any) -> list[Any] | None:
    """A value's own rows; None if it has none."""
    if isinstance(value, Tensor):
        rows: list[Any] | None = _plain(value) if value.dim() else None
        return rows
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return _joined({str(name): part for name, part in value.items()})
    if isinstance(value, (list, tuple)):
        joined = _joined({f"[{index}]": part for index, part in enumerate(value)})
        return None if joined is None else [list(row.values()) for row in joined]
    return None


def _joined(parts: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The rows of several values; None if no value has rows."""
    found = {name: _rows_if_any(part) for name, part in parts.items()}
    if (count := next((len(rows) for rows in found.values() if rows is not None), None)) is None:
        return None
    for name, part in parts.items():
        rows = found[name]
        if isinstance(part, (list, tuple)) and (rows is None or len(rows) != count):
            rows = found[name] = [_plain(entry) for entry in part]
        if rows is not None and len(rows) != count:
            first = next(iter(name for name, rows in found.items() if rows is not None))
            raise UsageError(
                f"predict_step: '{first}' has {count} rows and '{name}' has {len(rows)}: return equally many rows of "
                "each, or for rows of different lengths a list of dicts, one for each row"
            )
    columns = {name: [_plain(parts[name])] * count if rows is None else rows for name, rows in found.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _rows_if_any(value: Any) -> list[Any] | None:
    """A value's own rows; None also if its parts have different numbers of rows: it may be a list with one for each."""
    try:
        return _rows(value)
    except UsageError:
        return None


def _plain(value: Any) -> Any:
    """A value in the types of JSON, with all of its numbers; NaN and infinities, which JSON does not have, are None."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() and value.itemsize < 4 else value
        return value.tolist() if value.isfinite().all() else _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (complex, PurePath, date, torch.dtype, torch.device)):
        return str(value)
    if hasattr(value, "tolist"):  # an array or number of numpy
        return _plain(value.tolist())
    raise UsageError(
        f"predict_step: a {type(value).__name__} cannot be written to JSON: return tensors, numbers, text, or dicts, "
        "lists and tuples of them"
    )


class PredictionWriter(pl.Callback):
    """Write what `predict_step` returns as JSON lines, a line for each row of each batch, and say where.

    `{"batch": 0, "row": 0, "prediction": ...}`, in the order of the data; with several predict loaders, it begins with
    `"dataloader": 0`. `rows_of` says which rows a batch has; all numbers are written in full, and NaN and infinities,
    which JSON does not have, as `null`. With several processes each writes its own rows, to `NAME-rank1.jsonl` and so
    on beside rank 0's. Nothing is kept in memory.

    Args:
        output: the file; its name ends in `.jsonl`. An existing one is not replaced.

    Raises:
        UsageError: another ending; the file exists, or cannot be written; see `rows_of`.
    """

    def __init__(self, output: str = "predictions.jsonl") -> None:
        if Path(output).suffix != ".jsonl":
            raise UsageError(f"output={output!r}: predictions are written as JSON lines; end the name in .jsonl")
        self.output = Path(output)
        self._file: TextIO | None = None
        self._rows = 0

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Open the file, before anything is computed."""
        rank, ranks = data_rank(trainer)
        if ranks != trainer.world_size:
            raise UsageError(
                "predict: tensor and context ranks (mesh) have the same rows, and would write them several times: "
                "predict with FSDP2Strategy without a mesh, which opens the same checkpoint"
            )
        self._path = self.output.with_stem(f"{self.output.stem}-rank{rank}") if rank else self.output
        try:
            if self._path.exists():
                raise UsageError(f"output={str(self._path)!r} exists: name another file with --output")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("x", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"output={str(self._path)!r}: cannot be written ({error.strerror})") from None
        self._rows = 0

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Append the batch's rows."""
        assert self._file is not None
        loader = {"dataloader": dataloader_idx} if len(trainer.num_predict_batches) > 1 else {}
        for number, row in enumerate(rows_of(outputs)):
            line = {**loader, "batch": batch_idx, "row": number, "prediction": row}
            self._file.write(json.dumps(line) + "\n")
            self._rows += 1

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Close the file, and say what it holds."""
        self._close()
        rank_zero_info(f"predict: {self._rows:,} rows in {self._path}")

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Keep what was written."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
