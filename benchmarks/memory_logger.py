"""A logger that keeps every series it is given, for benchmarks that read a run's own figures afterwards."""

from typing import Any

from lightning.pytorch.loggers import Logger


class Memory(Logger):
    """Holds the values of each metric in `series`, in the order of the steps."""

    name = version = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.series: dict[str, list[float]] = {}

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.series.setdefault(name, []).append(float(value))
