"""The sample positions of the running optimizer step, for messages and records of callbacks."""

from typing import Any

from lightning_tricks._core.protocols import KnowsSamples


def step_samples(trainer: Any) -> list[tuple[int, int]] | None:
    """First and last position of each run of samples that the running optimizer step takes, of all ranks together.

    Ask before the step is counted: at the latest in a callback's `on_before_optimizer_step`. None for data that are not
    addressed by position; a data module that is has a method `step_samples()`, as TextData and TokenData.
    """
    data: Any = getattr(trainer, "datamodule", None)
    return data.step_samples() if isinstance(data, KnowsSamples) else None


def in_words(runs: list[tuple[int, int]]) -> str:
    """The runs for a message, in the form that `skip_samples` takes: `[[6496, 6503]]`."""
    return str([list(run) for run in runs])
