"""branch: decays off one trunk are the runs in one piece, to the bit; what has no stable part is refused."""

import contextlib
import io
import re
import shutil
from pathlib import Path

import branching_run as small
import pytest
import torch
from cli.parsers import one_parser  # noqa: F401, a fixture
from short_run import points, tensors

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.record import Record, to_json
from lightning_tricks.commands import branch as branch_module
from lightning_tricks.commands.branch import Trunk, read_trunk
from lightning_tricks.schedules import WarmupConstant, WarmupCosine, WarmupStableDecay

TRUNK = "runs/toy/version_0/checkpoints"
START = 6


@pytest.fixture(scope="module")
def trunk(tmp_path_factory, one_parser):  # noqa: F811
    """A run of 12 steps whose decay starts at step 9, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("branch")
    small.prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        small.command("fit")
        yield folder


def branch(step: int | str, steps: int | str, *args: str) -> Path:
    name = f"{TRUNK}/step={step}.ckpt" if isinstance(step, int) else step
    small.command("branch", "--ckpt_path", name, "--decay_steps", str(steps), *args)
    return small.newest("toy")


@pytest.fixture(scope="module")
def branched(trunk):
    """A branch of 5 steps, and what its command printed; a link led to its trunk."""
    link = Path(TRUNK, "link.ckpt")
    link.symlink_to(f"step={START}.ckpt")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run = branch(str(link), 5)
    link.unlink()
    return run, printed.getvalue()


def test_a_branch_is_the_run_in_one_piece_to_the_bit(branched):
    small.one_piece("whole", START, 5)
    small.assert_equal(branched[0], small.newest("whole"), START, START + 5)
    assert min(small.logged(branched[0], "train/loss")) == START


def test_learning_rate_and_shape_are_those_of_its_recipe_and_tensorboard_has_its_origin(trunk, monkeypatch):
    asked = []
    monkeypatch.setattr(branch_module, "line_of_branch", lambda *given: asked.append(given))
    logger = "{class_path: ResumingTensorBoardLogger, init_args: {save_dir: runs, name: board}}"
    shape = ("--model.schedule.decay_shape", "cosine", "--model.schedule.min_ratio", "0.2")
    branch(START, 4, "--model.optimizer.lr", "3e-3", *shape, "--trainer.logger", logger)
    run = small.newest("board")
    curve = WarmupStableDecay(warmup_steps=3, decay_start=START, decay_shape="cosine", min_ratio=0.2)
    expected = [(step, pytest.approx(curve.lr(3e-3, step, START + 4), rel=1e-6)) for step in range(START, START + 4)]
    assert points(run, "train/lr") == expected
    assert asked == [
        (Path(TRUNK).resolve().parent, START, [pytest.approx(lr.expected / 3e-3) for _, lr in expected], 3e-3)
    ]
    (group, *_) = small.saved(run, START + 4)["optimizer_states"][0]["param_groups"]
    assert (group["initial_lr"], group["lr"]) == (3e-3, pytest.approx(6e-4))
    text = tensors(run).Tensors("branch/text_summary")
    assert [event.step for event in text] == [START]
    assert "| decay_steps | 4 |" in text[0].tensor_proto.string_val[0].decode()


def test_its_origin_stands_in_its_checkpoints_its_log_its_recipe_and_on_the_terminal(branched):
    run, printed = branched
    trunk_path = str(Path(TRUNK, f"step={START}.ckpt").resolve())
    (line,) = [line for line in printed.splitlines() if line.startswith("Branch:")]
    assert line == f"Branch: a decay of 5 steps, from step {START} to {START + 5}, off {trunk_path}"
    for step in (START + 2, START + 5):
        origin = {"trunk": trunk_path, "trunk_step": START, "decay_steps": 5}
        assert small.saved(run, step)["callbacks"]["BranchLineage"] == origin
        assert small.saved(run, step)["lightning_tricks"]["recipe"] == (run / "config.yaml").read_text()
    assert f"branch/trunk: {trunk_path}" in (run / "hparams.yaml").read_text()
    recipe = (run / "config.yaml").read_text()
    assert "BranchLineage" in recipe
    assert f"decay_start: {START}" in recipe
    assert f"max_steps: {START + 5}" in recipe
    assert f"fit --config {run}/config.yaml --ckpt_path {run}/checkpoints/last.ckpt" in printed  # how to go on


def test_a_stopped_branch_goes_on_with_the_recipe_in_its_folder(branched):
    whole, _ = branched
    cut = Path(shutil.copytree(whole, whole.with_name("version_90")))
    for step in (10, 11):
        (cut / f"checkpoints/step={step}.ckpt").unlink()
    recipe = cut / "config.yaml"
    small.door.run(["fit", "--config", str(recipe), "--ckpt_path", f"{cut}/checkpoints/step=8.ckpt"])
    small.assert_equal(cut, whole, START, START + 5)
    assert small.saved(cut, START + 5)["callbacks"]["BranchLineage"]["trunk_step"] == START
    assert small.newest("toy") == cut


def test_a_trunk_whose_length_is_given_in_tokens_branches_too(branched):
    recipe = small.RECIPE.replace("  max_steps: 12\n", "").replace("name: toy", "name: tokens")
    Path("tokens.yaml").write_text("total_tokens: 192\n" + recipe)
    small.door.run(["fit", "--config", "tokens.yaml"])
    stable = small.newest("tokens")
    assert small.saved(stable, 12)["schedule"]["total_steps"] == 12
    command = ["branch", "--config", "tokens.yaml", "--decay_steps", "5", "--ckpt_path"]
    small.door.run([*command, f"{stable}/checkpoints/step={START}.ckpt"])
    run, end = small.newest("tokens"), START + 5
    for name in ("train/loss", "train/lr"):
        assert small.logged(run, name) == small.logged(branched[0], name)
    one, other = (small.saved(each, end)["state_dict"] for each in (run, branched[0]))
    assert all(torch.equal(one[name], other[name]) for name in other)
    with pytest.raises(UsageError, match="step 10 lies inside the decay of its run"):
        small.door.run([*command, f"{stable}/checkpoints/step=10.ckpt"])


def test_a_checkpoint_says_which_schedule_its_run_followed(trunk):
    path = f"{TRUNK}/step={START}.ckpt"
    schedule = WarmupStableDecay(warmup_steps=3, decay_steps=3)
    assert read_trunk(path) == Trunk(str(Path(path).resolve()), START, schedule, 12)


RULES = "[{pattern: head, schedule: {class_path: WarmupLinear, init_args: {warmup_steps: 2}}}]"
SIX = f"{TRUNK}/step=6.ckpt"
REFUSED = [  # checkpoint, length, other options, words of the line
    (None, 2, [], "--ckpt_path FILE"),
    (SIX, None, [], "--decay_steps N"),
    (SIX, 0, [], "decay_steps=0"),
    (f"{TRUNK}/step=2.ckpt", 2, [], "step 2 lies in the warmup"),
    (f"{TRUNK}/step=10.ckpt", 2, [], "inside the decay of its run, which started at step 9: .*from step 3 to 9"),
    ("weights.ckpt", 2, [], "weights only"),
    ("memory://bucket/a.ckpt", 2, [], "memory://bucket/a.ckpt: it is not there"),
    (SIX, 2, ["--model.schedule", "WarmupCosine"], "WarmupCosine: .*WarmupStableDecay"),
    (SIX, 2, ["--model.param_rules", RULES], r"model.param_rules\[0\].schedule=WarmupLinear"),
    (SIX, 2, ["--trainer.max_steps", "20"], "branch: trainer.max_steps .*leave it out"),
    (SIX, 2, ["--model.schedule.decay_start=3"], "model.schedule.decay_start"),
    (SIX, 2, ["--trainer.logger.version", "0"], "version_0/checkpoints, where that of the trunk lies"),
]


@pytest.mark.parametrize(("checkpoint", "steps", "more", "words"), REFUSED)
def test_what_cannot_branch_is_refused_in_one_line_and_leaves_no_folder(trunk, checkpoint, steps, more, words):
    weights = torch.load(SIX, weights_only=True)
    del weights["optimizer_states"], weights["lr_schedulers"]
    torch.save(weights, "weights.ckpt")
    before = sorted(Path("runs").glob("*/*"))
    # without the rules, which take half of the time to read
    Path("short.yaml").write_text(re.sub(r"    param_rules:.*?(?=data:)", "", small.RECIPE, flags=re.S))
    given = {"--ckpt_path": checkpoint, "--decay_steps": steps}
    args = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    with pytest.raises(UsageError, match=words) as refused:
        small.door.run(["branch", "--config", "short.yaml", *args, *more])
    assert "\n" not in str(refused.value)
    assert sorted(Path("runs").glob("*/*")) == before


def test_a_folder_of_deepspeed_gives_its_step_by_its_record(tmp_path):
    (tmp_path / "zero_to_fp32.py").touch()
    with pytest.raises(UsageError, match="resume it by fit, with decay_start"):
        read_trunk(str(tmp_path))
    (tmp_path / "record.json").write_bytes(to_json(Record(step=70)))
    assert read_trunk(str(tmp_path)) == Trunk(str(tmp_path.resolve()), 70)


def test_a_folder_of_shards_gives_step_and_schedule_without_its_tensors(tmp_path, monkeypatch):
    schedule = {"class_path": "WarmupConstant", "init_args": {"warmup_steps": 3}, "total_steps": -1}
    torch.save({"global_step": 5, "lr_schedulers": [], "schedule": schedule}, tmp_path / "meta.pt")
    (tmp_path / ".metadata").touch()
    monkeypatch.setattr(branch_module, "check_checkpoint", lambda path, resumes: path)
    assert read_trunk(str(tmp_path)) == Trunk(str(tmp_path.resolve()), 5, WarmupConstant(warmup_steps=3), -1)


@pytest.mark.parametrize(
    ("trunk", "total", "words"),
    [
        (Trunk("a.ckpt", 60, WarmupConstant(warmup_steps=50)), 100, ""),
        (Trunk("a.ckpt", 60, WarmupConstant(warmup_steps=70)), 100, "warmup of its run"),
        (Trunk("a.ckpt", 60, WarmupStableDecay(warmup_steps=4, decay_start=60), 100), 100, ""),
        (Trunk("a.ckpt", 60, WarmupStableDecay(warmup_steps=4, decay_start=59), 100), 100, "from step 4 to 59"),
        (Trunk("a.ckpt", 60, WarmupCosine(warmup_steps=4), 100), 100, "followed WarmupCosine"),
        # of checkpoints that do not say it, by the recipe
        (Trunk("a.ckpt", 90), 100, ""),
        (Trunk("a.ckpt", 91), 100, "step 91 lies inside the decay of its run, which started at step 90"),
        (Trunk("a.ckpt", 91), None, ""),
    ],
)
def test_the_run_s_own_schedule_says_where_its_stable_part_is(trunk, total, words):
    with pytest.raises(UsageError, match=re.escape(words)) if words else contextlib.nullcontext():
        trunk.check(WarmupStableDecay(warmup_steps=4, decay_steps=10), total)
