"""Write the predictions of `predict_step` to a file, batch by batch."""

import json
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, pl, rank_zero_info


def rows_of(prediction: Any) -> list[Any]:
    """One entry in plain types for each row of a batch: along the first dimension of a tensor, or of several tensors.

    A dict, list or tuple of tensors gives rows of the same form. Anything else that `predict_step` may return is one
    row.
    """
    if isinstance(prediction, Tensor):
        values = prediction.detach().cpu()
        values = values.double() if values.is_floating_point() and values.itemsize < 4 else values
        return values.tolist() if values.dim() else [values.item()]
    if isinstance(prediction, dict):
        columns = {name: rows_of(value) for name, value in prediction.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(prediction, (list, tuple)) and all(isinstance(value, Tensor) for value in prediction):
        return [list(row) for row in zip(*map(rows_of, prediction), strict=True)]
    return [prediction]


class PredictionWriter(pl.Callback):
    """Write what `predict_step` returns as JSON lines, a line for each row of each batch, and say where.

    `{"batch": 0, "row": 0, "prediction": ...}`, in the order of the data. With several processes each writes its own
    rows, to `NAME-rank1.jsonl` and so on beside rank 0's. Nothing is kept in memory.

    Args:
        output: the file; its name ends in `.jsonl`. An existing one is not replaced.

    Raises:
        UsageError: another ending; the file exists, or cannot be written.
    """

    def __init__(self, output: str = "predictions.jsonl") -> None:
        if Path(output).suffix != ".jsonl":
            raise UsageError(f"output={output!r}: predictions are written as JSON lines; end the name in .jsonl")
        self.output = Path(output)
        self._file: TextIO | None = None
        self._rows = 0

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Open the file, before anything is computed."""
        rank = trainer.global_rank
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
        for number, row in enumerate(rows_of(outputs)):
            line = {"batch": batch_idx, "row": number, "prediction": row}
            self._file.write(json.dumps(line, default=str) + "\n")
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
