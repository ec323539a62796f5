"""The comparison of strategies finds each broken promise, and takes what is right."""

import dataclasses
import json
import math

import pytest
import torch
from fill import result_of

from benchmarks import strategies, strategy_rows, strategy_runs
from benchmarks.strategy_rows import BATCH, CONFIG, LENGTH, ROWS, TRIALS, batches
from lightning_tricks.accounting import training_flops_per_token

SMALL = dataclasses.replace(CONFIG, d_model=32, n_layers=1)


def row_of(name):
    """A row of the newest result, to spoil."""
    return next(row for row in result_of("strategies")["rows"] if row["row"] == name)


SPOILT = {
    "loss": lambda row: row["trials"]["adamw"].update(loss=1.1e-5),
    "sgd loss": lambda row: row["trials"]["sgd"].update(loss=1.1e-5),
    "nan": lambda row: row["trials"]["foreign"].update(loss=math.nan),
    "first norm": lambda row: row["trials"]["adamw"].update(first_norm=1.1e-6),
    "norm": lambda row: row["trials"]["sgd"].update(norm=1.1e-6),
    "foreign norm": lambda row: row["trials"]["foreign"].update(norm=1.1e-6),
    "gradient": lambda row: row["trials"]["foreign"].update(gradient=6e-6),
    "lr": lambda row: row["trials"]["adamw"].update(lr=1e-12),
    "clip": lambda row: row["trials"]["sgd"].update(always_clipped=False),
    "tokens": lambda row: row["trials"]["adamw"].update(same_tokens=False),
    "flops": lambda row: row["trials"]["adamw"].update(same_flops=False),
    "ours is not counted": lambda row: row["trials"]["adamw"].update(same_flops=None),
    "groups": lambda row: row.update(groups=False),
    "bytes": lambda row: row.update(share=0.55),
    "resumed loss": lambda row: row["resume"].update(loss=1e-12),
    "resumed tensor": lambda row: row["resume"].update(differing_tensors=1),
    "no resume": lambda row: row.update(resume={"failed": "RuntimeError: no"}),
    "other layout": lambda row: row["into"].update(one=1.1e-5),
    "refused": lambda row: row["into"].update(one="refused: no"),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_row_that_misses_one_bound_is_told(spoil):
    row = row_of("fsdp2")
    SPOILT[spoil](row)
    assert len(strategies.misses(row)) == 1


def test_of_deepspeed_refusing_another_layout_is_the_promise():
    row = row_of("zero3")
    row["into"]["one"] = "failed: KeyError"
    assert strategies.misses(row) == ["into one: failed: KeyError"]
    row = row_of("zero3")
    row["into"]["one, weights"] = 1e-3
    assert strategies.misses(row) == ["into one, weights: 0.001"]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Train a trial of a smaller model in this process; options replace the trial's own."""

    def run(name, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("RANK", raising=False)
            patch.setattr(strategy_rows, "CONFIG", SMALL)
            patch.setitem(strategy_runs.TRIALS, name, TRIALS[name]._replace(**options))
            return strategy_runs.fit(name, ROWS["one"], 4, tmp_path_factory.mktemp("trial"))

    return run


@pytest.fixture(scope="module")
def right(train):
    """The run of one process that the others are compared with."""
    return train("sgd")


def misses_of(found, one, row):
    row["trials"] = {"sgd": strategies.against_one([found], one) | {"gradient": 0.0}}
    return strategies.misses(row)


def test_a_clip_that_is_wrong_by_a_percent_shows_and_the_right_one_does_not(train, right):
    assert misses_of(train("sgd"), right, row_of("fsdp2")) == []
    (missed, *_) = misses_of(train("sgd", clip=0.99 * TRIALS["sgd"].clip), right, row_of("fsdp2"))
    assert missed.startswith("sgd: loss ")


def test_gradients_that_are_wrong_in_scale_show_in_the_norm(train, right):
    class Halved(TRIALS["sgd"].module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) / 2

    found = misses_of(train("sgd", module=Halved), right, row_of("fsdp2"))
    assert "sgd: norm 5.0e-01" in found


def test_another_learning_rate_or_a_clip_that_does_not_bite_shows(train, right):
    faster = train("sgd", optimizer=lambda groups: torch.optim.SGD(groups, lr=0.31))
    assert any(missed.startswith("sgd: lr ") for missed in misses_of(faster, right, row_of("fsdp2")))
    loose = train("sgd", clip=100.0)
    assert "sgd: not always_clipped" in misses_of(loose, right, row_of("fsdp2"))


def test_a_run_counts_the_tokens_and_flops_of_each_step(right):
    assert right["tokens"] == [BATCH * LENGTH] * 3  # the first step has no rate
    assert right["flops"] == [BATCH * LENGTH * training_flops_per_token(SMALL, LENGTH, "causal")] * 3
    assert right["lr"] == pytest.approx([0.15, 0.3, 0.3, 0.165])  # two steps of warmup, half a cosine to a tenth


def test_the_ranks_share_a_batch_and_a_resume_goes_on_with_the_next():
    whole, parts = list(batches(3)), [list(batches(3, rank=rank, world=4)) for rank in range(4)]
    for step, batch in enumerate(whole):
        for name in ("input_ids", "labels"):
            assert torch.equal(torch.cat([part[step][name] for part in parts]), batch[name])
    counts = [int((part[0]["labels"] != -100).sum()) for part in parts]
    assert counts == [62, 54, 46, 38]  # 2 rows each, of 32 less 0, 2, 4, ... labels
    assert torch.equal(next(iter(batches(3, start=2)))["input_ids"], whole[2]["input_ids"])


def test_differences_are_those_worked_out_by_hand():
    assert strategies.largest_gap([1.0, 5.0], [1.5, 3.0]) == 2.0
    assert math.isnan(strategies.largest_gap([1.0, math.nan], [0.0, 1.0]))
    assert strategies.mean_loss([{"loss": [1.0, 2.0]}, {"loss": [3.0, 6.0]}]) == [2.0, 4.0]
    one = {"a": torch.tensor([4.0, -1.0]), "b": torch.tensor([0.5])}
    assert strategies.gradient_gap({"a": torch.tensor([4.0, -2.0]), "b": torch.tensor([0.5])}, one) == 0.25
    assert strategies.gradient_gap({"a": one["a"]}, one) == math.inf
    assert math.isnan(strategies.gradient_gap({**one, "b": torch.tensor([math.nan])}, one))


def test_every_rank_is_compared_with_the_one_process():
    one = {"loss": [4.0, 2.0], "norm": [2.0, 4.0], "lr": [0.1, 0.2], "clipped": [1.0], "tokens": [8], "flops": [80]}
    ranks = [one | {"loss": [3.0, 2.5]}, one | {"loss": [5.0, 2.5], "norm": [2.5, 2.0], "lr": [0.1, 0.5]}]
    found = strategies.against_one(ranks, one)
    assert (found["loss"], found["first_norm"], found["norm"], found["lr"]) == (0.5, 0.25, 0.5, pytest.approx(0.3))
    watched = ("always_clipped", "same_tokens", "same_flops")
    assert [found[name] for name in watched] == [True] * 3
    last = [one, one | {"clipped": [0.0], "tokens": [4], "flops": [40]}]
    found = strategies.against_one(last, one)
    assert [found[name] for name in watched] == [False] * 3
    assert strategies.against_one([one | {"flops": []}], one)["same_flops"] is None


def test_a_resume_is_exact_to_the_bit_on_every_rank_or_not():
    def ran(losses, value):
        return {"loss": losses, "tensors": {"weight w": torch.tensor([1.0, value]), "state 0 step": torch.tensor(2.0)}}

    whole = [ran([3.0, 2.0, 1.0], 0.5), ran([6.0, 5.0, 4.0], 0.5)]
    same = strategies.exactness(whole, [ran([2.0, 1.0], 0.5), ran([5.0, 4.0], 0.5)], 1)
    assert same == {"loss": 0.0, "tensors": 2, "differing_tensors": 0}
    next_value = torch.nextafter(torch.tensor(0.5), torch.tensor(1.0)).item()
    other = strategies.exactness(whole, [ran([2.0, 1.0], 0.5), ran([5.0, 4.5], next_value)], 1)
    assert other == {"loss": 0.5, "tensors": 2, "differing_tensors": 1}
    less = [ran([2.0, 1.0], 0.5), ran([5.0, 4.0], 0.5)]
    del less[1]["tensors"]["state 0 step"]
    assert strategies.exactness(whole, less, 1)["differing_tensors"] == 1
    assert strategies.exactness(whole, [less[0], {"refused": "no"}], 1) == {"refused": "no"}


def test_bytes_are_those_of_storages_each_counted_once():
    left_behind = torch._to_functional_tensor(torch.zeros(3))  # as a compilation may: it has no memory to ask for
    before = strategy_runs.held([])
    tensor = torch.zeros(1000, requires_grad=True)
    views = [tensor.detach()[:10], tensor.detach()[10:]]
    tensor.square().sum().backward()  # its gradient is known to C++ alone
    assert strategy_runs.held([]) - before == 8000
    del tensor, views
    assert strategy_runs.held([]) == before
    del left_behind


def test_checkpoints_are_opened_by_as_few_processes_as_can_be():
    pairs = strategies.jobs(["one", "fsdp2", "hsdp", "zero3"])
    assert pairs == [
        [("one", "one"), ("fsdp2", "one"), ("hsdp", "one"), ("zero3", "one")],
        [("fsdp2", "fsdp2"), ("one", "fsdp2"), ("hsdp", "fsdp2"), ("zero3", "fsdp2")],
        [("hsdp", "hsdp")],
        [("zero3", "zero3")],
    ]


def test_a_row_without_its_package_is_left_out_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.strategy_rows.find_spec", lambda name: None if name == "deepspeed" else name)
    monkeypatch.setattr("benchmarks.strategy_rows.shutil.which", lambda name: None)
    table = strategies.Table(["ddp", "fsdp2_compiled", "zero1"], 10, tmp_path)
    assert table.left_out == {"fsdp2_compiled": "needs a C++ compiler", "zero1": "needs deepspeed"}
    assert table.names == ["one", "ddp"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(["fsdp3"], "unknown row fsdp3: give some of one ddp"), (["ddp", "--steps", "3"], "--steps 3: give 4 at least")],
)
def test_a_wrong_option_is_one_line(capsys, arguments, line):
    with pytest.raises(SystemExit) as told:
        strategies.main(arguments)
    assert told.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1


def test_a_fresh_run_of_a_few_steps_keeps_what_is_promised(tmp_path, capsys):
    out = tmp_path / "strategies.json"
    assert strategies.main(["fsdp1", "--steps", "4", "--out", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [row["row"] for row in result["rows"]] == ["one", "fsdp1"]
    assert all(strategies.misses(row) == [] for row in result["rows"])
    assert result["rows"][1]["share"] == pytest.approx(0.5, abs=0.01)
    assert result["rows"][1]["into"].keys() == {"one", "fsdp2"}
    assert "FSDP2Strategy" in result["rows"][1]["groups"]  # the line that decay groups say of flat parameters
    assert capsys.readouterr().out.count("as promised") == 2
