"""Each module of the benchmarks can be imported, and each one that has a small size runs once at that size."""

import dataclasses
import importlib
import json
import logging
import math
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from cli.parsers import no_hyper_parameters, one_parser  # noqa: F401, fixtures
from harness import preloaded

import benchmarks
from lightning_tricks import Llama
from lightning_tricks.commands.ladder.rungs import Ladder
from lightning_tricks.commands.ladder.sizes import Size, base_of

pytestmark = pytest.mark.pages

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("[!_]*.py"))


def module(name):
    with pytest.MonkeyPatch.context() as patch:  # some hide the GPU, which other tests want
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return importlib.import_module(f"benchmarks.{name}")


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _warnings_as_before():
    level = logging.getLogger("lightning.pytorch").level
    with warnings.catch_warnings():  # a benchmark ignores all of them
        yield
    logging.getLogger("lightning.pytorch").setLevel(level)


@pytest.fixture
def numbers(tmp_path):
    """A text to train on."""
    file = tmp_path / "text.txt"
    file.write_text("".join(f"the number {i} is {i * i}\n" for i in range(5000)))
    return file


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_imported(name):
    assert module(name).__doc__


def test_every_file_with_tests_marked_gpu_is_named():
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert marked == set(module("gpu_tests").FILES)


# Every stage of the GPU benchmark runs, and every contender in one of them.
FEWER = {
    "gpt2_124m": "ours_watched,hand_whole,stock", "llama1b": "ours,hand_blocks", "llama7b": "ours,bare,fp8_tensorwise",
    "llama8b": "ours", "memory_7b": "ours_bf16,stock_hand", "rowwise_7b": "fp8_rowwise", "litgpt_1b": "ours",
    "fsdp2_1b": "one_device,fsdp2", "fp8_7b": "fp8_tensorwise", "llama7b_16k": "ours", "experts_1b": "experts",
    "documents_1b": "documents,documents_dense",
}  # fmt: skip
SMALL = {"vocab_size": 272, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 32, "d_ff": 64}


def in_this_process(command, output, seconds):
    """Runs what `gpu.run_limited` would start, without another start of Python; the exit code."""
    try:
        importlib.import_module(command[2]).main([str(argument) for argument in command[3:]])
    except SystemExit as ended:
        return ended.code or 0
    return 0


@pytest.mark.usefixtures("one_parser", "no_hyper_parameters")
def test_the_gpu_benchmark(tmp_path, monkeypatch, text_file):
    gpu, checks, smoke, precision = (module(name) for name in ("gpu", "gpu_checks", "gpu_smoke", "precision"))
    decoder = precision.MODEL["model.init_args.decoder.init_args"] | SMALL
    data = {"data.init_args.vocab_size": SMALL["vocab_size"], "data.init_args.seq_len": SMALL["max_seq_len"]}
    data |= {"data.init_args.files": text_file}
    monkeypatch.setattr(precision, "MODEL", precision.MODEL | data | {"model.init_args.decoder.init_args": decoder})
    for name, value in {"STEPS": 9, "LOG_EVERY": 3, "FALL": 0.9}.items():
        monkeypatch.setattr(smoke, name, value)
    monkeypatch.setattr(checks, "PROOF", ("fp8_tensorwise",))
    monkeypatch.setattr(gpu, "run_limited", in_this_process)
    monkeypatch.setattr(sys, "executable", preloaded.python())  # for the tests on the GPU
    for stage, contenders in FEWER.items():
        monkeypatch.setitem(gpu.STAGES, stage, (contenders, 60))
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--dry", "--limit", "3600", "--out", str(tmp_path), *gpu.STAGES])
    assert ended.value.code == 0, (tmp_path / "gpu.log").read_text()
    table = (tmp_path / "summary.md").read_text()
    assert "To look at:" not in table
    assert "| fp8_tensorwise | " in table
    for stage in FEWER:
        assert {run["contender"] for run in read(tmp_path / f"{stage}.json")["runs"]} == set(FEWER[stage].split(","))


def test_contenders_and_calls_of_the_gpu_benchmark(tmp_path, monkeypatch, capsys):
    gpu, train = module("gpu"), module("gpu_train")
    for contenders, _ in gpu.STAGES.values():
        assert not train.unknown(contenders.split(",") if contenders else [])
    with pytest.raises(SystemExit):
        train.main(["llama7b", "--dry", "--out", str(tmp_path / "a.json"), "--contenders", "ours,nobody_again"])
    assert "unknown contender nobody_again: add it to `variants`" in capsys.readouterr().err
    for stages in gpu.GROUPS.values():
        assert len(stages) + 2 <= 8  # files of a call, with its log and summary
        assert sum(gpu.STAGES[stage][1] for stage in stages) <= gpu.CALL_SECONDS
    # what was under way when the time was up is named, with its seconds, and runs again in the next call
    result = tmp_path / "tests.json"
    result.write_text(json.dumps({"stage": "tests", "collected": 2, "tests": {}, "running": "test_slow"}))
    monkeypatch.setattr(gpu, "run_limited", lambda *_: None)
    assert gpu.run_process("tests", "", result, tmp_path / "gpu.log", True, time.monotonic() + 60) is None
    assert "- tests: stopped in test_slow after 0 s" in module("gpu_table").summary([tmp_path], None)
    assert not {"test_slow", "under_way_seconds"} & {*module("stage_file").to_try_again(read(result))}


def test_the_goals_of_the_gpu_benchmark():
    table = module("gpu_table")

    def run(contender, speed, peak):
        figures = {"micro_batch_ms": 1.0, "peak_allocated_gib": peak, "flops_per_token": {"causal": 1.0}}
        return {"round": 0, "contender": contender, "tokens_per_second": speed, **figures}

    runs = [run("ours", 100.0, 40.0), run("fp8_tensorwise", 130.0, 1.0), run("fp8_other", 140.0, 1.0)]
    memory = [run("ours_bf16", 1.0, 60.0), run("ours_lean", 1.0, 50.0), run("stock_hand", 1.0, 100.0)]
    losses = {"bf16_mixed": [9.0, 8, 7, 6, 5, 4], "fp8_tensorwise": [9.0, 8, 7, 6, 5.12, 4.12]}
    proof = [{"format": name, "loss": loss} for name, loss in losses.items()]
    stages = {"fp8_7b": runs, "memory_7b": memory}
    call = {name: {"stage": name, "untimed": [], "runs": of} for name, of in stages.items()}
    found = {goal.what: goal for goal in table.goals([call, {"precision_proof": {"runs": proof}}])}
    # without a proof of its own fp8_other counts for nothing; 0.12 nats behind, at 1 nat a sixth of the run, are 2 %
    assert found["fp8_7b: the best fp8 over bf16 at equal loss, tokens/s,"].figure == pytest.approx(1.3 * 0.98)
    assert found["memory_7b: the least peak of ours over that of stock Lightning with fused AdamW"].figure == 0.5
    assert found["llama7b: model FLOP/s over P,"].cells()[1:] == ["not measured", "-"]


def test_checkpoints(tmp_path):
    options = ["--parameters", "2e6", "--rounds", "1", "--folder", str(tmp_path), "--memory_folder", str(tmp_path)]
    module("checkpoints").main([*options, "--out", str(tmp_path / "out.json")])
    assert {path.name for path in tmp_path.iterdir()} == {"out.json"}


def test_start_up(tmp_path, monkeypatch):
    start_up = module("start_up")
    monkeypatch.setattr(start_up, "CASES", {"first_step": (["--version"], {}), "steps": (["ls"], {})})
    start_up.main([str(ROOT), str(ROOT), "--cases", "first_step,steps", "--rounds", "1", "--out", str(tmp_path / "a")])
    first, steps = (read(tmp_path / "a")["cases"][name] for name in ("first_step", "steps"))
    assert first["seconds"] == first["rounds"][0]
    assert all(value < 1 for value in steps["seconds"])  # a twentieth of what `ls` takes more than `--version`


def test_branch_forecast(tmp_path, text_file, monkeypatch):
    branches = module("branch_forecast")
    monkeypatch.setattr(branches, "STARTS", {40: 10, 80: 20})
    monkeypatch.setattr(branches, "EVERY", 2)
    data = ["--data.files", text_file, "--data.vocab_size", "300", "--data.cache_dir", str(tmp_path / "cache")]
    small = ["--data.seq_len", "16", "--model.decoder.d_model", "16", "--trainer.limit_val_batches", "1"]
    branches.main(["--out", str(tmp_path / "out.json"), *data, *small])
    first, second = read(tmp_path / "out.json")["branches"]
    assert "never fell" in first["line"]
    assert "loss at the end of this decay" in second["line"]
    assert math.isfinite(first["loss"] + second["loss"])


def test_overhead(tmp_path, monkeypatch, capsys):
    overhead = module("overhead")
    micro = dataclasses.replace(overhead.SIZES["micro"], warmup=2, contenders=("bare", "ours"))
    monkeypatch.setitem(overhead.SIZES, "micro", micro)
    overhead.main(["--sizes", "micro", "--rounds", "1", "--steps", "5", "--out", str(tmp_path / "out.json")])
    assert "| micro | ours |" in capsys.readouterr().out


def test_metric_cost(tmp_path, monkeypatch):
    metric_cost = module("metric_cost")
    for name, steps in (("EVERY", 10), ("WARMUP", 5), ("STEPS", 20)):
        monkeypatch.setattr(metric_cost, name, steps)
    metric_cost.main(["--rounds", "1", "--out", str(tmp_path / "out.json")])
    result = read(tmp_path / "out.json")
    assert result["self_log_us"] > result["buffer_us"]


def test_decoder_parts_kept_memory_and_muon_cost(monkeypatch):
    decoder_parts, kept_memory, muon_cost = map(module, ("decoder_parts", "kept_memory", "muon_cost"))
    measured = decoder_parts.measure("toy", ["rotation", "fused_block_eager"], 1)
    assert {"rotation", "fused_block_eager"} == set(measured)
    assert "rotation by halves" in decoder_parts.table({"sizes": {"toy": measured}})
    monkeypatch.setattr(kept_memory, "LENGTH", 16)
    assert kept_memory.units((64, 128), "full", False, torch.bfloat16) == 1.0
    _, dtype = muon_cost.stepped({(8, 16): 3})
    muon_cost.products({(8, 16): 3}, dtype)()


def test_packed_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module("packed_documents"), "CASES", ((1, 1024, 4, 2, 1, 8),))
    module("packed_documents").main(["--rounds", "1", "--out", str(tmp_path / "out.json")])
    assert "| 1 x 1,024 | 4 | 2 of 8 |" in capsys.readouterr().out
    assert read(tmp_path / "out.json")["cases"][0]["fp32"]["error"] < 1e-6


@pytest.mark.long
def test_cold_starts(tmp_path, monkeypatch, capsys):
    cold_starts = module("cold_starts")
    monkeypatch.setattr(cold_starts, "WAYS", {"not compiled": "false", "cold": "false", "warm": "false"})
    toy = {"d_model": "16", "n_layers": "1", "n_heads": "2"}
    sizes = [word for name, size in toy.items() for word in (f"--model.init_args.decoder.init_args.{name}", size)]
    monkeypatch.setattr(cold_starts, "STEP", (*cold_starts.STEP, *sizes))
    cold_starts.main(["--rounds", "1", "--recipes", "tiny", "--out", str(tmp_path / "out.json")])
    assert "| tiny | not compiled | " in capsys.readouterr().out
    assert read(tmp_path / "out.json")["recipes"]["tiny"]["cold"][0]["cpu_seconds"] > 0


def test_peers(tmp_path):
    peers = module("peers")
    peer = peers.Peer(peers.BASE, "toy", False, False, tmp_path / "bare")
    peer.order(2)
    assert [peer.answer().keys(), peer.answer().keys()] == [set(), {"cpu", "wall"}]
    assert len(peer.losses) == 2
    peer.end()


def test_doctor_trials(tmp_path, numbers):
    trials = module("doctor_trials")
    short = dataclasses.replace(next(each for each in trials.FAULTS if each.name == "clip"), steps=60)
    row = trials.judge(short, tmp_path / "run", numbers)
    assert "| clip at 0.001 | `clip_pinned` (warning) |" in trials.tables({"faults": [row], "healthy": []})["faults"]


def test_doctor_logs(tmp_path, capsys):
    logs = module("doctor_logs")
    assert (len(logs.FAULTS), len(logs.HEALTHY)) == (30, 30)
    logs.main(["early_spike", "cosine"])
    assert "| tuned | 3 | 3 | 0 | 0 | 3 | 0 | none |" in capsys.readouterr().out


def test_compare_trials(tmp_path, monkeypatch, numbers):
    trials = module("compare_trials")
    monkeypatch.chdir(tmp_path)
    runs = [("base", 0), ("base", 1)]
    for kind, seed in runs:
        trials.train(Path("runs"), numbers, kind, seed, steps=3)
    (row,) = trials.judge(Path("runs"), {"seeds": (runs, {})})
    assert row["lines"][0].startswith("no difference that these seeds can show")


def test_ladder_family_holds_out_a_size_once_that_is_nearest_to_two_distances():
    config = Llama(vocab_size=4096, d_model=256, n_layers=4, n_heads=4)
    recipe = Size(config, steps=5000, rows=32, accumulate=4, ranks=1, seq_len=1024)
    ladder = Ladder(Path("out"), {}, recipe, base_of(config, None), 2)
    found = module("ladder_family").held_out(ladder, recipe.flops / 10, (4.0, 50.0, 70.0))
    assert found[1:] == [recipe]


def test_ladder_laws(tmp_path, capsys):
    assert module("ladder_laws").main(["--draws", "2", "--out", str(tmp_path / "out.json")]) == 0
    assert "\n| the law holds | 10x | " in capsys.readouterr().out
    assert {row["refused"] for row in read(tmp_path / "out.json")["forecasts"]} <= {0, 0.5, 1}


def test_plan_foreign(tmp_path, capsys):
    assert module("plan_foreign").main(["torch recommender", "--out", str(tmp_path / "out.json")]) == 0
    assert "1 of 1: a figure within 15%, or a line" in capsys.readouterr().out


def test_mup_transfer(tmp_path, text_file, monkeypatch):
    mup_transfer = module("mup_transfer")
    real = mup_transfer.TextData
    monkeypatch.setattr(mup_transfer, "TextData", lambda **options: real(
        [text_file], cache_dir=str(tmp_path), val_fraction=0.5, **{**options, "vocab_size": 300}))  # fmt: skip
    out = tmp_path / "mup.json"
    mup_transfer.main(["--steps", "2", "--widths", "128", "64", "--lrs", "0.001", "--out", str(out)])
    assert [(run["width"], run["mup"]) for run in read(out)["runs"]] == [(128, True), (64, True), (64, False)]


def test_strategies(tmp_path, capsys):
    assert module("strategies").main(["ddp", "--steps", "4", "--out", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out.count("as promised") == 2


def test_lightning_suite(tmp_path, monkeypatch):
    suite = module("lightning_suite")
    tests = tmp_path / "checkout" / suite.TESTS
    tests.mkdir(parents=True)
    (tmp_path / "checkout/src").mkdir()
    (tmp_path / "checkout/src/version.info").write_text("2.6.6\n")
    (tmp_path / "checkout/pytest.ini").write_text("[pytest]\n")
    (tests / "test_toy.py").write_text(
        "import lightning.pytorch as pl\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "def trainer():\n"
        "    options = dict.fromkeys(('logger', 'enable_progress_bar', 'enable_model_summary'), False)\n"
        "    return pl.Trainer(max_steps=2, accelerator='cpu', enable_checkpointing=False, **options)\n"
        "def test_trains():\n"
        "    trainer().fit(BoringModel())\n"
        "def test_counts_callbacks():\n"
        "    assert trainer().callbacks == []\n"
    )
    monkeypatch.setattr(sys, "executable", preloaded.python())
    with pytest.raises(SystemExit) as ended:
        suite.main([str(tmp_path / "checkout"), "monitors", "--folder", str(tmp_path), "--out", str(tmp_path / "out")])
    assert ended.value.code == 1
    (row,) = read(tmp_path / "out")["modes"]["monitors"]["differences"]
    assert (row["test"].rpartition("::")[2], row["kind"]) == ("test_counts_callbacks", "failed")
