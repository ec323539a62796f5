"""The loss of a step has one owner: all who read it have the value worked out by hand, whatever training_step returns.

A batch is rows of token losses, -1 where a label does not count.
"""

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import processes
from harness.models import LLAMA, batches
from harness.runs import On, fit
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_tricks import FP16Mixed, LanguageModel
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import (
    BatchSizeWarmup,
    DoctorMonitor,
    RunLedger,
    SpikeRollback,
    StepGuard,
    TrainingProgressBar,
)
from lightning_tricks.logs.ledger_diff import compare
from lightning_tricks.logs.ledger_file import read_ledger
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.step_loss import LOGGED
from lightning_tricks.mixins import TokenMeanMixin


def sums(batch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Nats with a gradient of 1 a token, and the number of tokens."""
    counts = batch >= 0
    return (batch * counts).sum() + counts.sum() * (weight - weight.detach()).sum(), counts.sum()


class Foreign(pl.LightningModule):
    """A module that we never saw: it returns the mean over its rows, of which each has as many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        nats, tokens = sums(batch, self.weight)
        return nats / tokens

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Tokens(TokenMeanMixin, Foreign):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.token_mean(*sums(batch, self.weight), capacity=batch.numel())


class Ours(LanguageModel):
    """The language model, with sums that can be worked out by hand in place of its decoder's."""

    def __init__(self) -> None:
        super().__init__(LLAMA, optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-9))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step({"labels": batch}, batch_idx)

    def token_sums(self, batch: Any) -> tuple[Tensor, Tensor]:
        nats, tokens = sums(batch["labels"], torch.zeros(1))
        return nats + 0 * sum(parameter.sum() for parameter in self.parameters()), tokens


class Manual(Foreign):
    """Two optimizers in one batch, as a GAN has them; the second one's loss is twice the first one's."""

    def __init__(self, optimizers: int = 2) -> None:
        super().__init__()
        self.automatic_optimization, self.number = False, optimizers

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for factor, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers], 1):
            optimizer.zero_grad()
            nats, tokens = sums(batch, self.weight)
            self.manual_backward(factor * nats / tokens)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=1e-3) for _ in range(self.number)]


def _first(items: list[Any]) -> Any:
    return items[0]


def judged(guard: StepGuard, optimizer: int = 0) -> list[float]:
    """The losses that a guard has let into its window."""
    return in_window(guard._windows[optimizer])


def in_window(window: Any) -> list[float]:
    state = window.state_dict()
    return [
        value for value, is_there in zip(state["values"][0].tolist(), state["filled"].tolist(), strict=True) if is_there
    ]


def read_by_all(folder: Path, module: Any, data: list[Tensor], *others: Any, **options: Any) -> dict[str, list[float]]:
    """The losses of the steps, as each reader has them."""
    guard, rollback = StepGuard(window_steps=8, active_after_steps=8), SpikeRollback(window_steps=8, keep_snapshots=1)
    doctor, ledger = DoctorMonitor(), RunLedger(str(folder / "ledger.jsonl"))
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")
        own = [guard, rollback, doctor, ledger, TrainingProgressBar()]
        defaults = {"max_steps": -1, "max_epochs": 1, "log_every_n_steps": 1, "use_distributed_sampler": False}
        run = fit(module, *own, *others, data=batches(data), **{**defaults, **options})
    found = {"log": run.of(LOGGED), "guard": judged(guard), "rollback": in_window(rollback._detector._window)}
    found["doctor"] = list(doctor._history.points.get(LOGGED, ((), ()))[1])
    if run.trainer.is_global_zero:
        steps = read_ledger(folder / "ledger.jsonl").steps
        found["ledger"] = [line["loss"] for _, line in sorted(steps.items()) if line["loss"] is not None]
        found["line"] = [float(one) for one in re.findall(r"^step .*?  loss (\S+)", printed.getvalue(), re.M)]
    return found


def agree(found: dict[str, list[float]], expected: list[float]) -> None:
    # a loss is at most divided and multiplied by a number of micro-batches in fp32; the line has four decimals
    assert found == {name: pytest.approx(expected, rel=1e-6, abs=1e-4 if name == "line" else 0) for name in found}


# ---- one process: rows of token losses, a list for each micro-batch

WINDOWS = {
    "whole windows, two rows each": (2, [[[1], [3]], [[5], [7]], [[2], [2]], [[4], [4]]], [4, 3], [4, 3]),
    "a short last window": (2, [[[2]], [[2]], [[5]]], [2, 5], [2, 5]),
    "three micro-batches, then one": (3, [[[2]], [[2]], [[2]], [[2]]], [2, 2], [2, 2]),
    # rows count for a module without counts; tokens, where it has them
    "one row and three": (2, [[[4]], [[2], [2], [2]]], [2.5], [2.5]),
    "ragged labels": (2, [[[1, 1, 1, 1]], [[6, -1, -1, -1]]], [3.5], [2]),
    "ragged labels in a short window": (2, [[[1, 3]], [[8, -1]], [[7, -1]]], [5, 7], [4, 7]),
    "no accumulation": (1, [[[1, 3]], [[8, -1]]], [2, 8], [2, 8]),
}


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("kind", [Foreign, Tokens, Ours])
def test_the_loss_is_that_of_the_micro_batches_that_came(tmp_path, case, kind):
    accumulate, rows, by_rows, by_tokens = WINDOWS[case]
    data = [torch.tensor(each, dtype=torch.float32) for each in rows]
    found = read_by_all(tmp_path, kind(), data, accumulate_grad_batches=accumulate)
    agree(found, by_rows if kind is Foreign else by_tokens)


@pytest.mark.parametrize("kind", [Tokens, Ours])
def test_labels_that_do_not_count_are_in_no_loss_and_a_step_of_them_has_none(tmp_path, kind):
    none, some = torch.full((1, 2), -1.0), torch.tensor([[3.0, 5.0]])
    found = read_by_all(tmp_path, kind(), [none, some, none, none, some, some], accumulate_grad_batches=2)
    line = found.pop("line")
    agree(found, [4, 4])
    assert line[0] == line[-1] == 4


def test_a_batch_size_that_grows_leaves_equal_losses_equal(tmp_path):
    warmup = BatchSizeWarmup(start=1, double_every=1)
    found = read_by_all(tmp_path, Tokens(), [torch.tensor([[2.0]])] * 7, warmup, accumulate_grad_batches=4)
    agree(found, [2, 2, 2])


@pytest.mark.parametrize("kind", [Foreign, Tokens])
def test_a_loss_scale_of_fp16_is_no_part_of_it(tmp_path, kind):
    plugins = [FP16Mixed(init_scale=1024.0)]
    data = [torch.tensor([[1.0]]), torch.tensor([[3.0]])]
    agree(read_by_all(tmp_path, kind(), data, accumulate_grad_batches=2, plugins=plugins), [2])


def test_in_manual_optimization_the_losses_of_a_batch_are_added_and_each_optimizer_is_judged_by_its_own(tmp_path):
    guard, data = StepGuard(window_steps=8, active_after_steps=8), [torch.tensor([[1.0], [3.0]])] * 2
    ledger = RunLedger(str(tmp_path / "ledger.jsonl"))
    fit(Manual(), guard, ledger, data=batches(data), max_epochs=1, max_steps=-1, log_every_n_steps=1)
    assert (judged(guard, 0), judged(guard, 1)) == ([2, 2], [4, 4])
    assert [line["loss"] for line in read_ledger(tmp_path / "ledger.jsonl").steps.values()] == [6, 6]


def test_several_backward_passes_before_one_step_are_one_loss_for_all(tmp_path):
    class Twice(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for _ in range(2):
                nats, tokens = sums(batch, self.weight)
                self.manual_backward(nats / tokens)
            optimizer.step()

    agree(read_by_all(tmp_path, Twice(1), [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]])]), [4, 10])


def test_an_optimizer_that_computes_several_losses_of_a_batch_has_the_first_one(tmp_path):
    class Searching(Foreign):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return batch.mean() * self.weight.square().sum()

    ledger = RunLedger(str(tmp_path / "ledger.jsonl"))
    fit(Searching(), ledger, data=batches([torch.tensor([[2.0]])]), max_steps=1, log_every_n_steps=1)
    assert read_ledger(tmp_path / "ledger.jsonl").steps[0]["loss"] == 2


@pytest.mark.parametrize("kind", [Foreign, Tokens])
def test_micro_batches_that_no_step_followed_are_forgotten(tmp_path, kind):
    class Ends(kind):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> Any:
            return -1 if batch_idx == 3 and self.current_epoch == 0 else None

    data = [torch.tensor([[value]]) for value in (1.0, 3.0, 100.0, 100.0)]
    found = read_by_all(tmp_path, Ends(), data, accumulate_grad_batches=2, max_epochs=2, max_steps=2)
    agree(found, [2, 2])


def test_a_micro_batch_without_a_loss_adds_nothing(tmp_path):
    class Leaves(Foreign):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch.max() < 9 else None

    data = [torch.tensor([[value]]) for value in (9.0, 3.0, 4.0, 6.0)]
    agree(read_by_all(tmp_path, Leaves(), data, accumulate_grad_batches=2), [3, 5])


def test_a_batch_that_is_none_makes_no_step_and_no_line(tmp_path):
    data = DataLoader([None, torch.tensor([[3.0]]), None, torch.tensor([[5.0]])], batch_size=1, collate_fn=_first)
    ledger = RunLedger(str(tmp_path / "ledger.jsonl"))
    fit(Foreign(), StepGuard(), ledger, data=data, max_steps=2, log_every_n_steps=1)
    assert [line["loss"] for line in read_ledger(tmp_path / "ledger.jsonl").steps.values()] == [3, 5]


def test_of_a_step_that_fetches_its_batches_each_micro_batch_counts_as_much(tmp_path):
    class Fetches(Foreign):
        def training_step(self, dataloader_iter: Any) -> Any:
            return super().training_step(next(dataloader_iter)[0], 0)

    data = [torch.tensor([[1.0]]), torch.tensor([[3.0], [3.0], [3.0]])]  # hooks are given the batch before
    ledger = RunLedger(str(tmp_path / "ledger.jsonl"))
    fit(Fetches(), ledger, data=batches(data), max_steps=1, log_every_n_steps=1, accumulate_grad_batches=2)
    line = read_ledger(tmp_path / "ledger.jsonl").steps[0]
    assert (line["loss"], line["batch"]) == (2, None)


@pytest.mark.parametrize(
    "value", [{"nats": 1.0}, (2.0, 1), [1, 2], torch.zeros(2), (torch.zeros(2), torch.ones(2)), (torch.ones(()),)]
)
def test_something_else_of_the_name_loss_sums_is_left_alone(tmp_path, value):
    module = Foreign()
    module.loss_sums = value
    agree(read_by_all(tmp_path, module, [torch.tensor([[2.0]])] * 2), [2, 2])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_module_may_count_by_itself_also_in_parts_of_one(tmp_path, shape):
    module = Foreign()
    module.loss_sums = torch.full(shape, 0.5), torch.full(shape, 0.25)
    agree(read_by_all(tmp_path, module, [torch.tensor([[7.0]])] * 2, accumulate_grad_batches=2), [2])


class ByHand(Manual):
    """One optimizer, and its own way to the gradients."""

    def __init__(self, backward: Any) -> None:
        super().__init__(1)
        self.backward_of = backward

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.backward_of(self, (batch * self.weight).flatten())
        optimizer.step()


def test_losses_with_a_gradient_of_their_own_count_by_their_mean(tmp_path):
    module = ByHand(lambda module, losses: module.manual_backward(losses, gradient=torch.ones_like(losses) / 2))
    agree(read_by_all(tmp_path, module, [torch.tensor([[1.0, 3.0]])]), [2])


def test_where_a_module_shows_no_loss_the_norms_are_judged_alone(tmp_path):
    guard = StepGuard(window_steps=8, active_after_steps=4)
    ledger = RunLedger(str(tmp_path / "ledger.jsonl"))
    data = [torch.tensor([[2.0]])] * 8 + [torch.tensor([[1e6]])]
    module = ByHand(lambda module, losses: losses.sum().backward())
    run = fit(module, guard, ledger, data=batches(data), max_steps=9, log_every_n_steps=1)
    assert run.of("guard/skipped_steps") == [0] * 8 + [1]
    assert {line["loss"] for line in read_ledger(tmp_path / "ledger.jsonl").steps.values()} == {None}


def test_a_loss_in_bf16_is_multiplied_in_fp32(tmp_path):
    class Half(Foreign):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return (1.0 + 0 * self.weight.sum()).bfloat16()

    data = [torch.ones(1, 1)] * 3
    found = read_by_all(tmp_path, Half(), data, accumulate_grad_batches=3)
    bound = 2**-8  # bf16 rounds a third by half a unit of its last place at most
    assert found == {name: pytest.approx([1], abs=bound) for name in found}


def test_a_module_that_logs_the_name_itself_has_its_own_number_there_and_nobody_reads_it(tmp_path):
    class Logs(Foreign):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("train/loss", 77.0)
            return super().training_step(batch, batch_idx)

    found = read_by_all(tmp_path, Logs(), [torch.tensor([[2.0]])] * 2)
    assert found.pop("log") == [77, 77]
    agree(found, [2, 2])


def test_nothing_is_measured_before_somebody_asks():
    seen = []
    ask = On(on_train_batch_end=lambda trainer, *_: seen.append(dict(MetricBuffer.of(trainer)._current.means)))
    run = fit(Foreign(), ask, data=batches([torch.tensor([[2.0]])]), max_steps=1, log_every_n_steps=1)
    assert (seen, run.names()) == ([{}], set())


# ---- two ranks: rows of rank 0 and of rank 1

RANKS = {
    "unequal rows": (Foreign, [[[[4.0]]], [[[2.0], [2.0], [2.0]]]], [2.5]),
    "unequal tokens": (Tokens, [[[[1.0, 1.0, 1.0, 1.0]]], [[[6.0, -1, -1, -1]]]], [2]),
    "no token on one rank": (Tokens, [[[[-1.0, -1]]], [[[3.0, 5.0]]]], [4]),
    "the language model": (Ours, [[[[1.0, 1.0, 1.0, 1.0]]], [[[6.0, -1, -1, -1]]]], [2]),
    "a short window": (Tokens, [[[[2.0]], [[2.0]], [[5.0]]], [[[2.0]], [[2.0]], [[5.0]]]], [2, 5]),
}


def on_rank(rank: int, folder: Path) -> None:
    for case, (kind, data, expected) in RANKS.items():
        (folder / case).mkdir(exist_ok=True)
        own = [torch.tensor(rows) for rows in data[rank]]
        found = read_by_all(
            folder / case, kind(), own, accumulate_grad_batches=2, devices=2, strategy="ddp", accelerator="cpu"
        )
        if rank:
            del found["log"], found["doctor"]  # which the first rank alone has
        agree(found, expected)


@pytest.mark.long
def test_on_two_ranks_the_loss_is_that_of_all_tokens_or_rows_and_ledgers_of_both_layouts_agree(tmp_path):
    processes.run(on_rank, tmp_path)
    rows = [torch.tensor(batch) for rank in RANKS["unequal tokens"][1] for batch in rank]
    ledger = RunLedger(str(tmp_path / "one.jsonl"))
    fit(Tokens(), ledger, data=batches(rows), max_steps=1, log_every_n_steps=1, accumulate_grad_batches=2)
    one, two = read_ledger(tmp_path / "one.jsonl"), read_ledger(tmp_path / "unequal tokens" / "ledger.jsonl")
    assert compare(one, two, 1e-6).parts["loss"].near == 1
