"""SafeCheckpoint shows the same of its best checkpoints as Lightning's ModelCheckpoint, on the same run."""

import random
from pathlib import Path
from typing import Any

import pytest
from guards.test_safe_checkpoint import Batches, Model, fit

from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import SafeCheckpoint


class Scores(Model):
    """Logs a given score after each step."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", self.scores[self.trainer.global_step])
        return super().training_step(batch, batch_idx)


class Shown(pl.Callback):
    """What a saver shows after each step."""

    def __init__(self, saver: Any) -> None:
        self.saver, self.rows = saver, []

    def on_train_batch_start(self, *_: Any) -> None:
        saver = self.saver
        best = saver.best_k_models
        full = len(best) == (saver.keep_best if isinstance(saver, SafeCheckpoint) else saver.save_top_k)
        self.rows.append(
            {
                "best": step_of(saver.best_model_path),
                "best score": number(saver.best_model_score),
                "current score": number(saver.current_score),
                "scores": sorted(map(number, best.values())),
                "worst": number(saver.kth_value) if full else None,
                "worst's": number(best[saver.kth_best_model_path]) if full else None,
            }
        )


def step_of(path: str) -> int | None:
    return int(Path(path).stem.rpartition("step=")[2]) if path else None


def number(value: Any) -> float | None:
    return None if value is None else float(value)


def both(folder: Path, steps: int, model: Any, monitor: str, mode: str, keep: int, **options: Any) -> Any:
    """Run the same training under either; returns what they have shown."""
    common = {"monitor": monitor, "mode": mode, "every_n_train_steps": 1}
    rows = []
    for name, make in {
        "theirs": lambda at: pl.callbacks.ModelCheckpoint(at, save_top_k=keep, filename="{step}", **common),
        "ours": lambda at: SafeCheckpoint(at, keep_best=keep, **common),
    }.items():
        saver = make(folder / name)
        shown = Shown(saver)
        fit([shown, saver], steps, model(), Batches(1000), **options)
        shown.on_train_batch_start()
        rows.append(shown.rows)
    return rows


@pytest.mark.parametrize(("mode", "keep"), [("min", 1), ("max", 1), ("min", 3), ("max", 2)])
def test_ties_and_the_current_score_are_those_of_model_checkpoint(tmp_path, mode, keep):
    scores = random.Random(keep).choices([1.0, 2.0, 3.0], k=14)
    assert len(set(scores)) == 3
    theirs, ours = both(tmp_path, 14, lambda: Scores(scores), "score", mode, keep)
    assert ours == theirs
    assert len({row["current score"] for row in ours}) > 1


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("monitor", ["step", "epoch"])
def test_epoch_and_step_are_metrics_that_nobody_logs(tmp_path, monitor, mode):
    options = {"max_epochs": 3, "limit_train_batches": 2}
    theirs, ours = both(tmp_path, -1, Model, monitor, mode, 1, **options)
    assert ours == theirs
    assert ours[-1]["best"] == {"min": 1, "max": 6 if monitor == "step" else 5}[mode]
