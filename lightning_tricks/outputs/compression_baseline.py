"""Compare the model's bits/byte with those of zlib and xz on the same text."""

import lzma
import time
import zlib
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import Module, Trainer, pl

__all__ = ["CompressionBaseline"]


def zlib_bits_per_byte(text: bytes) -> float:
    """Bits per byte of `zlib -9` on `text`."""
    return 8 * len(zlib.compress(text, 9)) / len(text)


def xz_bits_per_byte(text: bytes, before: bytes = b"") -> float:
    """Bits per byte that `text` adds to `xz -9e` when the compressor has seen `before`, both in one stream."""
    preset = 9 | lzma.PRESET_EXTREME
    seen = len(lzma.compress(before, preset=preset)) if before else 0
    return 8 * (len(lzma.compress(before + text, preset=preset)) - seen) / len(text)


class CompressionBaseline(pl.Callback):
    """Print at the end how many bits/byte the model and general compressors need for the validation text.

    A language model is a compressor; if it needs fewer bits than these, it has learnt more than repetition. The table
    also says at which validation the model went below each compressor. Never changes training. Needs a data module with
    `validation_text()` and, for xz, `training_text()`, as `TextData` has them, and the metric `val/bits_per_byte`.

    Args:
        xz: Compare with `xz -9e` too, alone and after the whole training text (half a minute for 12 MB).

    Raises:
        UsageError: the data module cannot give its text back.
    """

    def __init__(self, xz: bool = False) -> None:
        self.xz = xz
        self.history: list[tuple[int, float, float]] = []
        self._start = time.perf_counter()

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Refuse what no command has refused."""
        self.check_run(trainer, trainer.datamodule, stage)  # type: ignore[attr-defined]

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse a data module that cannot give its text, before any process is started."""
        if stage != "fit":  # there is no table then, and the data may be others
            return
        if not hasattr(datamodule, "validation_text"):
            raise UsageError("CompressionBaseline needs a data module with validation_text(), such as TextData")
        if self.xz and not hasattr(datamodule, "training_text"):
            raise UsageError(
                "CompressionBaseline.xz=True needs a data module with training_text(), such as TextData: write that "
                "method, or set xz to false"
            )

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Remember (step, seconds, bits/byte) of each validation."""
        value = trainer.callback_metrics.get("val/bits_per_byte")
        if value is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.history.append((trainer.global_step, time.perf_counter() - self._start, float(value)))

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Print the table."""
        if not trainer.is_global_zero or not self.history:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        text = data.validation_text()
        lines = {"zlib -9": zlib_bits_per_byte(text)}
        if self.xz:
            lines["xz -9e"] = xz_bits_per_byte(text)
            lines["xz -9e after the training text"] = xz_bits_per_byte(text, data.training_text())
        step, _, final = self.history[-1]
        print(f"\nValidation text ({len(text) / 1e6:.2f} MB) in bits/byte, lower is better:")
        print(f"  {'this model':32s} {final:.4f}  at step {step}")
        for name, value in lines.items():
            print(f"  {name:32s} {value:.4f}  {self._crossing(value)}")

    def _crossing(self, value: float) -> str:
        for step, seconds, bits in self.history:
            if bits < value:
                return f"crossed by step {step}, {seconds / 60:.1f} min"
        return "not crossed"

    def state_dict(self) -> dict[str, Any]:
        """The history, so that a resumed run still knows when it crossed."""
        return {"history": [list(row) for row in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the history up again; its seconds count from the latest start."""
        self.history = [(int(s), float(t), float(b)) for s, t, b in state_dict["history"]]
