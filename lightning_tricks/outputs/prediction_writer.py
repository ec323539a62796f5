"""Write the predictions of `predict_step` to a file, batch by batch."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_info
from lightning_tricks._trainer.run_facts import data_rank, planned_data_ranks

__all__ = ["PredictionWriter"]


def rows_of(prediction: Any) -> list[Any]:
    """One entry in plain types for each row of a batch: of a tensor, or of a dict of tensors with equally many rows.

    Rows lie along the first dimension. NaN and infinities become None.

    Raises:
        UsageError: the tensors of a dict have different numbers of rows; anything but tensors.
    """
    if isinstance(prediction, Tensor) and prediction.dim():
        rows: list[Any] = _plain(prediction)
        return rows
    if not isinstance(prediction, Mapping) or not all(isinstance(p, Tensor) and p.dim() for p in prediction.values()):
        raise UsageError(
            f"predict_step: {type(prediction).__name__} cannot be written: return a tensor with a row for each row of "
            "the batch, or a dict of such tensors"
        )
    counts = {name: len(part) for name, part in prediction.items()}
    if len(set(counts.values())) > 1:
        raise UsageError(f"predict_step: {counts} rows: return equally many rows of each")
    columns = {str(name): _plain(part) for name, part in prediction.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _plain(value: Tensor) -> Any:
    """The numbers of a tensor, in full; NaN and infinities, which JSON does not have, are None."""
    value = value.detach().cpu()
    value = value.double() if value.is_floating_point() and value.itemsize < 4 else value
    return value.tolist() if value.isfinite().all() else _without_nan(value.tolist())


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return value if math.isfinite(value) else None


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

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse ranks that share rows, before any process is started."""
        devices, nodes = trainer.num_devices, trainer.num_nodes
        if stage == "predict" and planned_data_ranks(trainer.strategy, devices, nodes) != devices * nodes:
            raise UsageError(
                "predict: tensor and context ranks (mesh) have the same rows, and would write them several times: "
                "predict with FSDP2Strategy without a mesh, which opens the same checkpoint"
            )

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Open the file, before anything is computed."""
        self.check_run(trainer, None, "predict")
        rank, _ = data_rank(trainer)
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
