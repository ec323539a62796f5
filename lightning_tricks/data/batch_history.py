"""The samples of each optimizer step of a run, over resumes that changed the global batch or passed over samples.

A checkpoint holds it as spans: steps in a row that took equally many samples. A run that never changed has one.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.data.skipped_samples import SkippedSamples

Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class Span:
    """Optimizer steps in a row that took equally many samples.

    Args:
        step: steps done before its first one.
        sample: position of its first sample.
        rows: samples of one step, of all ranks and micro-batches together.
        skipped: ranges of positions that it passed over, first and last of each.
    """

    step: int
    sample: int
    rows: int
    skipped: Sequence[Sequence[int]] = ()

    def runs(self, step: int) -> Runs:
        """First and last position of each unbroken run of samples in a step; the first step of all is 0."""
        skipped = SkippedSamples(self.skipped)
        return skipped.runs(skipped.index(self.sample) + (step - self.step) * self.rows, self.rows)

    def goes_on_from(self, before: "Span") -> bool:
        """Whether `before` would have taken the same samples."""
        ranges = [SkippedSamples(span.skipped).ranges for span in (before, self)]  # a checkpoint has lists for tuples
        return before.rows == self.rows and ranges[0] == ranges[1] and before.runs(self.step) == self.runs(self.step)


class BatchHistory:
    """The spans of a run.

    Args:
        spans: by their first step; a step belongs to the last one that has begun.
    """

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self.spans = list(spans)

    @classmethod
    def of_state(cls, state: Sequence[dict[str, Any]]) -> "BatchHistory":
        """The history in a checkpoint; see `state`."""
        return cls([Span(**span) for span in state])

    def extended(self, span: Span) -> "BatchHistory":
        """The history of a run that went on with `span`."""
        spans = [before for before in self.spans if before.step < span.step]
        return BatchHistory(spans if spans and span.goes_on_from(spans[-1]) else [*spans, span])

    def state(self) -> list[dict[str, Any]]:
        """The spans in plain types, for a checkpoint."""
        return [asdict(span) | {"skipped": [list(pair) for pair in span.skipped]} for span in self.spans]

    def rows(self, steps: int) -> int | None:
        """Samples that the first `steps` steps took; None where the spans do not begin with the first of all."""
        if not self.spans or self.spans[0].step:
            return None
        ends = [*(span.step for span in self.spans[1:]), steps]
        lengths = (min(end, steps) - span.step for span, end in zip(self.spans, ends, strict=True))
        return sum(span.rows * max(length, 0) for span, length in zip(self.spans, lengths, strict=True))

    def runs(self, step: int) -> Runs:
        """First and last position of each unbroken run of samples that a step took.

        Args:
            step: as the logs count: the first step of all is 0.

        Raises:
            UsageError: no span has the step.
        """
        if not self.spans:
            raise UsageError(
                f"step={step}: the checkpoint does not tell the samples of any step: its run overfitted a few batches, "
                "or an older version wrote it"
            )
        spans = [span for span in self.spans if span.step <= step]
        if not spans:
            first = self.spans[0].step
            before = "before it, the run took other data" if first else "as the logs count"
            raise UsageError(f"step={step}: the run took these data from step {first} on ({before}); give a later step")
        return spans[-1].runs(step)
