"""The plan of a run before it starts is what the run does: step by step, for each group; and its pictures."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from cli.parsers import no_hyper_parameters, shared_parser  # noqa: F401, fixtures
from cli.test_run_in_tokens import RECIPE
from harness import runs
from harness.token_files import write_token_files

from lightning_tricks import (
    MuP,
    OptimizerMixin,
    ParallelDims,
    ParamRule,
    ScheduleLR,
    TokenData,
    WarmupConstant,
    WarmupCosine,
    WarmupStableDecay,
)
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import BatchSizeWarmup, LRMonitor, LRScalingRule, SafeCheckpoint, TotalTokens
from lightning_tricks.cli import load_recipe
from lightning_tricks.commands.schedule.plan import planned, without_weights
from lightning_tricks.commands.schedule.terminal import NamedPlan, draw_in_terminal, lr_lines, marks_row, place_of
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Llama
from lightning_tricks.monitors.tensorboard_dashboard import planned_lrs
from lightning_tricks.schedules import WarmupLinear
from lightning_tricks.strategies import FSDP2Strategy

CONFIG = Llama(vocab_size=64, d_model=16, n_layers=1, n_heads=2, max_seq_len=8)
DATA = SimpleNamespace(micro_batch_size=4, seq_len=8)  # 32 tokens in a micro-batch


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def model(schedule=None, **options):
    options = {"optimizer": adamw, "schedule": schedule or WarmupLinear(warmup_steps=2), **options}
    return LanguageModel(CONFIG, **options)


def settings(max_steps=12, **options):
    return {"max_steps": max_steps, "accelerator": "cpu", "devices": 1, **options}


# ---- the plan is the run


class Recorder(pl.Callback):
    """Notes what each step of a run has."""

    def __init__(self):
        self.steps, self.micro_batches = [], 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.micro_batches += 1

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        groups = [(g["name"], float(g["lr"]), float(g["weight_decay"])) for g in optimizer.param_groups]
        self.steps.append((groups, self.micro_batches))
        self.micro_batches = 0


def test_every_steps_lr_decay_and_batch_of_each_group_are_those_of_the_run(tmp_path):
    folder = write_token_files(tmp_path)
    rules = [
        ParamRule("embed", lr_scale=3.0),
        ParamRule(
            "head", schedule=WarmupConstant(warmup_steps=5), decay_schedule=WarmupCosine(warmup_steps=0, min_ratio=0.0)
        ),
    ]
    module = model(WarmupStableDecay(warmup_steps=3, decay_steps=4), param_rules=rules, mup=MuP(8))
    data = TokenData(train=str(folder / "train.bin"), seq_len=8, micro_batch_size=4)
    callbacks = [
        BatchSizeWarmup(stages={0: 1, 4: 2, 7: 4}, lr_rule="sqrt"),
        LRScalingRule(reference_batch_tokens=32),
        Recorder(),
    ]
    options = {"max_steps": 12, "accumulate_grad_batches": 4}
    plan = planned(module, data, settings(**options, callbacks=callbacks), steps=range(12))
    assert module.decoder is None  # the module can still be trained
    run = runs.fit(module, LRMonitor(), *callbacks, data=data, log_every_n_steps=1, **options)
    steps = callbacks[-1].steps
    assert len({group.name for group in plan.groups}) == len(plan.groups) >= 5
    for number, group in enumerate(plan.groups):
        used = [step[0][number] for step in steps]
        assert {name for name, _, _ in used} == {group.name}
        assert group.lr == tuple(lr for _, lr, _ in used)  # to the bit
        assert group.weight_decay == tuple(decay for _, _, decay in used)
    assert plan.rows == tuple(4 * number for _, number in steps)
    assert plan.batch_tokens == tuple(32 * number for _, number in steps) == (32,) * 4 + (64,) * 3 + (128,) * 5
    assert plan.tokens == tuple(32 * number for number in (0, 1, 2, 3, 4, 6, 8, 10, 14, 18, 22, 26))
    assert plan.total_tokens == 32 * 30
    assert list(plan.lr) == pytest.approx(run.of("train/lr"), rel=1e-6)  # the buffer has fp32
    assert len({group.lr for group in plan.groups}) >= 3
    assert len(set(plan.groups[-1].weight_decay)) + len(set(plan.groups[0].weight_decay)) > 2


def test_the_dashboard_shows_the_same_curve():
    optimizer = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.06, "lr_scale": 3.0}])
    shown = planned_lrs(ScheduleLR(optimizer, WarmupCosine(warmup_steps=3), 20), 20)
    plan = planned(
        model(WarmupCosine(warmup_steps=3), optimizer=lambda g: torch.optim.AdamW(g, lr=0.02)), DATA, settings(20)
    )
    assert plan.steps == tuple(range(20))
    assert [lr for _, lr in shown] == pytest.approx(plan.lr, rel=1e-12)


# ---- values worked out by hand


def test_lr_tokens_and_phases_of_warmup_stable_and_decay():
    schedule = WarmupStableDecay(warmup_steps=10, decay_steps=20, decay_shape="linear")
    options = settings(100, accumulate_grad_batches=2, num_nodes=2, devices=3, val_check_interval=50)
    plan = planned(model(schedule), DATA, {**options, "callbacks": [SafeCheckpoint(every_n_train_steps=40)]})
    assert [(phase.name, phase.step) for phase in plan.phases] == [
        ("warmup", 0), ("stable", 10), ("decay", 80), ("end", 99),
    ]  # fmt: skip
    # first step: a tenth of the peak; last one: 1 of 20 steps is left
    assert [phase.lr for phase in plan.phases] == pytest.approx([0.001, 0.01, 0.01, 0.0005])
    in_a_step = 2 * 6 * 32  # micro-batches x processes x tokens
    assert [phase.tokens for phase in plan.phases] == [0, 10 * in_a_step, 80 * in_a_step, 100 * in_a_step]
    assert {(phase.rows, phase.batch_tokens) for phase in plan.phases} == {(48, in_a_step)}
    assert dict(zip(plan.steps, plan.lr, strict=True))[90] == pytest.approx(0.005)  # the middle of the decay
    assert (plan.total_tokens, plan.peak) == (100 * in_a_step, 0.01)
    assert plan.validations == (25, 50, 75, 100)  # 50 micro-batches are 25 steps
    assert plan.checkpoints == (40, 80)
    assert plan.notes == ()


def test_validations_and_the_end_are_counted_with_the_batch_that_grows():
    stages = BatchSizeWarmup(stages={0: 1, 10: 2})
    trainer = settings(-1, accumulate_grad_batches=2, val_check_interval=10, callbacks=[TotalTokens(32 * 30), stages])
    plan = planned(model(WarmupLinear(warmup_steps=5)), DATA, trainer)
    assert plan.total_steps == 20  # 10 micro-batches in 10 steps, then 20 in 10
    assert plan.validations == (10, 15, 20)
    assert [(phase.name, phase.step) for phase in plan.phases] == [
        ("warmup", 0), ("decay", 5), ("larger batch", 10), ("end", 19),
    ]  # fmt: skip
    assert [phase.batch_tokens for phase in plan.phases] == [32, 32, 64, 64]


def test_a_long_plan_has_its_corners_and_marks_that_stay():
    saver = SafeCheckpoint(every_n_train_steps=3000, permanent_steps="powers_of_two")
    plan = planned(
        model(WarmupStableDecay(warmup_steps=777, decay_steps=501)), DATA, settings(10_000, callbacks=[saver])
    )
    assert {0, 776, 777, 9498, 9499, 9999} <= set(plan.steps)
    assert len(plan.steps) < 610
    assert plan.permanent == tuple(2**power for power in range(14))
    assert plan.checkpoints == tuple(sorted({3000, 6000, 9000, *plan.permanent}))


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ({"devices": 8, "num_nodes": 2, "strategy": FSDP2Strategy(mesh=ParallelDims(tensor=4, context=2))}, 2),
        ({"devices": 4, "strategy": pl.strategies.ModelParallelStrategy(data_parallel_size=2)}, 2),
        ({"devices": 4, "num_nodes": 3, "strategy": pl.strategies.ModelParallelStrategy()}, 3),
        ({"devices": [0, 1, 5]}, 3),
        ({"devices": "0,2"}, 2),
        ({"devices": "auto", "accelerator": "cpu"}, 1),
    ],
)
def test_ranks_that_share_their_rows_count_once(trainer, ranks):
    assert planned(model(), DATA, settings(4) | trainer).phases[0].rows == 4 * ranks


def test_what_the_recipe_does_not_tell_is_left_out_and_said():
    plan = planned(model(), None, settings(4, devices="auto", accelerator="auto", max_epochs=2))
    assert (plan.tokens, plan.rows, plan.total_tokens) == (None, None, None)
    assert [note.split(" ")[0] for note in plan.notes] == ["trainer.devices=auto:", "the", "trainer.max_epochs=2"]


# ---- modules


def test_no_weight_is_drawn_for_a_plan_and_a_fused_optimizer_takes_the_parameters():
    wide = LanguageModel(Llama(vocab_size=128256, d_model=8192, n_layers=2, n_heads=64, max_seq_len=8), optimizer=adamw)
    assert planned(wide, DATA, settings(4)).peak == 0.01
    twin = without_weights(wide)
    assert sum(param.numel() for param in twin.parameters()) > 3e9
    assert {param.untyped_storage().nbytes() for param in twin.parameters()} == {4}
    assert wide.decoder is None


class Mixed(OptimizerMixin, pl.LightningModule):
    def __init__(self):
        super().__init__(schedule=WarmupConstant(warmup_steps=2), optimizer=adamw)
        self.layer = torch.nn.Linear(2, 2)


def test_any_module_with_the_mixin_has_a_plan_and_keeps_its_weights():
    module = Mixed()
    before = module.layer.weight.clone()
    assert planned(module, None, settings(4)).lr == (0.005, 0.01, 0.01, 0.01)
    assert torch.equal(module.layer.weight, before)
    assert module.layer.weight.stride() == (2, 1)


def test_a_module_without_the_mixin_is_refused():
    with pytest.raises(UsageError, match="model=LightningModule: only a run tells the learning rates"):
        planned(pl.LightningModule(), DATA, settings(6))


# ---- in a terminal


def plans(*lengths, **options):
    made = [planned(model(**options), DATA, settings(length)) for length in lengths]
    return [NamedPlan(f"r{number}", plan) for number, plan in enumerate(made)]


def test_the_terminal_shows_the_curve_within_80_columns_and_24_lines_in_both_alphabets():
    named = plans(400, param_rules=[ParamRule("embed", lr_scale=4.0)])
    for unicode, allowed in ((True, r"[\x20-\x7e─│┌┐└┘▁█\u2800-\u28ff]*"), (False, r"[\x20-\x7e]*")):
        lines = draw_in_terminal(named, unicode=unicode).split("\n")
        assert all(re.fullmatch(allowed, line) for line in lines)
        assert len(lines) <= 23
        assert max(map(len, lines)) <= 80
        assert lines[0] == "lr over steps of r0: 400 steps, 12.8k tokens"
        text = "\n".join(lines)
        for words in ("decay:embed (lr x 4)", "12.8k"):
            assert words in text
    assert "None" not in text
    assert draw_in_terminal(named, columns=120, lines=50).count("\n") > text.count("\n")


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 50)])
def test_both_axes_have_labels_that_are_exact_at_each_quarter_of_the_peak(columns, lines, color):
    named = plans(400)
    peak = max(max(group.lr) for group in named[0].plan.groups)
    rows = draw_in_terminal(named, columns=columns, lines=lines, color=color).split("\n")
    top, bottom = (next(at for at, row in enumerate(rows) if sign in row) for sign in "┌└")
    labels = {at: row.rpartition("│")[2].strip() for at, row in enumerate(rows) if top < at < bottom}
    found = {at: float(label) for at, label in labels.items() if label}
    assert [*found.values()] == pytest.approx([peak * part / 4 for part in (4, 3, 2, 1, 0)], rel=5e-3)
    height = bottom - top - 1
    for at, value in found.items():  # the row holds the value: rows divide 1.02 of the peak
        low, high = (1.02 * peak * (bottom - at - 1 + edge) / height for edge in (0, 1))
        assert low - 1e-9 <= value <= high
    assert len(rows[bottom + 1].split()) >= 4


def test_the_table_says_what_the_first_step_of_each_phase_has():
    text = draw_in_terminal(plans(100))
    rows = [re.split(r"  +", line) for line in text.split("\n")]
    assert ["warmup", "0", "0", "0.005", "4 rows, 32 tokens", "0.1"] in rows
    assert ["decay", "2", "64", "0.01", "4 rows, 32 tokens", "0.1"] in rows
    assert ["end", "99", "3.2k", "0.000102", "4 rows, 32 tokens", "0.1"] in rows


def test_names_of_marks_do_not_overlap():
    marks = [(0.0, "warmup"), (2.0, "stable"), (3.0, "lost"), (50.0, "decay"), (100.0, "now")]
    assert marks_row(marks, 100.0, 40) == [" warmup              decay            now", " stable"]


def test_tokens_may_be_the_axis_and_a_second_recipe_lies_over_the_first():
    named = plans(400, 1000)
    text = draw_in_terminal(named, axis="tokens")
    assert "lr over tokens of r0" in text
    assert "r1: 1,000 steps, 32k tokens, peak lr 0.01" in text
    assert place_of(named[0].plan, 100, "tokens") == 3200.0
    assert place_of(named[0].plan, 400, "tokens") == 12800.0
    assert [line.label for line in lr_lines(named, "steps")] == [
        "r0: decay, no_decay", "r1: decay, no_decay",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="x=tokens"):
        lr_lines([NamedPlan("r", planned(model(), None, settings(4)))], "tokens")


# ---- the command


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
def test_the_command_draws_the_stages_or_refuses_the_number_of_micro_batches_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")
    (tmp_path / "one.yaml").write_text("total_tokens: 320\n" + RECIPE)
    stages = ["--trainer.devices", "2", "--trainer.strategy", "FSDP2Strategy", "--trainer.strategy.mesh.pipeline", "2"]
    words = ["schedule", "--config", "one.yaml", "--pipeline", "true", *stages]
    door.run(words)
    assert "1F1B, 4 micro-batches: 2 pipeline ranks wait 20%" in capsys.readouterr().out
    with pytest.raises((UsageError, SystemExit)):
        door.run([*words, "--trainer.strategy.pipeline_micro_batches", "1"])


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
def test_the_command_draws_a_recipe_in_tokens_against_another_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")
    (tmp_path / "one.yaml").write_text("total_tokens: 320\n" + RECIPE)
    (tmp_path / "two.yaml").write_text("total_tokens: 160\n" + RECIPE)
    door.run(["schedule", "--config", "one.yaml", "--against", "two.yaml"])
    said = capsys.readouterr().out
    assert "lr over steps of small: 20 steps, 320 tokens" in said
    assert "two: 10 steps, 160 tokens, peak lr 0.0003" in said
    (tmp_path / "small.yaml").write_text("total_tokens: 160\n" + RECIPE)  # the name of the first one's run
    door.run(["schedule", "--config", "one.yaml", "--against", "small.yaml"])
    said = capsys.readouterr().out
    assert re.search(r" small: \w.* small\.yaml: \w", said, re.S), "each curve has the label of its recipe"
    assert "small.yaml: 10 steps, 160 tokens" in said
    door.run(["schedule", "--config", "one.yaml", "--total_tokens", "640"])
    assert "40 steps, 640 tokens" in capsys.readouterr().out
    plan = planned(*load_recipe("--config", "one.yaml"))
    assert plan.total_steps == 20
    door.run(["schedule", "--config", "one.yaml", "--against", "two.yaml", "--json", "-"])
    one, two = json.loads(capsys.readouterr().out)
    assert (one["name"], one["total_steps"], two["name"], two["total_steps"]) == ("small", 20, "two", 10)
    assert one["groups"][0]["lr"] == list(plan.groups[0].lr)
    assert one["phases"][-1]["name"] == "end"
    with pytest.raises(UsageError, match=r"^schedule: json=no/plan.json: there"):
        door.run(["schedule", "--config", "one.yaml", "--json", "no/plan.json"])
