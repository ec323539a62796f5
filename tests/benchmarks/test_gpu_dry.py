"""The GPU benchmark runs from end to end on a CPU at toy sizes, and a stage that fails costs no other."""

import contextlib
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli.parsers import no_hyper_parameters, one_parser  # noqa: F401, fixtures
from harness.preloaded import python
from harness.runs import fit

from benchmarks import (
    gpu,
    gpu_checks,
    gpu_profile,
    gpu_sizes,
    gpu_smoke,
    gpu_table,
    gpu_tests,
    gpu_train,
    precision,
    stage_file,
)
from benchmarks import machine as described
from lightning_tricks._lightning import pl

pytestmark = pytest.mark.usefixtures("one_parser", "no_hyper_parameters")

ROOT = Path(__file__).resolve().parents[2]


def in_this_process(command, output, seconds):
    """Runs what `gpu.run_limited` would start, without another start of Python; the exit code."""
    module, arguments = command[2], [str(argument) for argument in command[3:]]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            {"benchmarks.gpu_train": gpu_train, "benchmarks.gpu_checks": gpu_checks}[module].main(arguments)
        except SystemExit as ended:
            return ended.code or 0
    return 0


# Every stage runs, and every contender in one of them.
FEWER = {
    "gpt2_124m": "ours_watched,hand_whole,stock", "llama1b": "ours,hand_blocks", "llama7b": "ours,bare,fp8_tensorwise",
    "llama8b": "ours", "memory_7b": "ours_bf16_state,stock_hand", "rowwise_7b": "fp8_rowwise", "litgpt_1b": "ours",
    "fsdp2_1b": "one_device,fsdp2",
}  # fmt: skip
SMALL = {"vocab_size": 272, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 32, "d_ff": 64}


def contenders_of(stages):
    return {gpu_train.plain(name) for contenders, _ in stages.values() for name in contenders.split(",") if name}


@pytest.fixture
def small_models(monkeypatch, text_file):
    """The proof of each format and the correctness checks with models, a text and runs that are smaller still."""
    decoder = precision.MODEL["model.init_args.decoder.init_args"] | SMALL
    data = {"data.init_args.vocab_size": SMALL["vocab_size"], "data.init_args.seq_len": SMALL["max_seq_len"]}
    data |= {"data.init_args.files": text_file}
    monkeypatch.setattr(precision, "MODEL", precision.MODEL | data | {"model.init_args.decoder.init_args": decoder})
    for name, value in {"STEPS": 9, "LOG_EVERY": 3, "FALL": 0.9}.items():
        monkeypatch.setattr(gpu_smoke, name, value)


@pytest.mark.usefixtures("small_models")
def test_a_dry_run_goes_through_every_stage_and_call(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "run_limited", in_this_process)
    monkeypatch.setattr(sys, "executable", python())  # for the tests on the GPU
    assert len(gpu_checks.PROOF) >= 5, "past eight graphs of a function torch compiles no more"
    monkeypatch.setattr(gpu_checks, "PROOF", ("fp8_tensorwise",))
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    every = contenders_of(gpu.STAGES)
    for stage, contenders in FEWER.items():
        monkeypatch.setitem(gpu.STAGES, stage, (contenders, 60))
    assert contenders_of(gpu.STAGES) == every - {"litgpt"}  # which need not be installed
    for call, stages in gpu.GROUPS.items():
        with pytest.raises(SystemExit) as ended:
            gpu.main(["--dry", "--limit", "3600", "--out", str(tmp_path / call), call])
        assert ended.value.code == 0, (tmp_path / call / "gpu.log").read_text()
        written = {path.name for path in (tmp_path / call).iterdir()}
        assert written == {*(f"{stage}.json" for stage in stages), "gpu.log", "summary.md"}
        assert len(written) <= 8
        for other, its in gpu.GROUPS.items():  # the yardstick once is enough
            monkeypatch.setitem(gpu.GROUPS, other, [name for name in its if name != "yardstick"])
    capsys.readouterr()
    gpu.main(["--summary", *(str(tmp_path / call) for call in gpu.GROUPS)])
    table = capsys.readouterr().out
    assert "To look at:" not in table
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*/*.json")}
    assert files.keys() == gpu.STAGES.keys()
    yardstick = files["yardstick"]
    assert all(yardstick[name] > 0 for name in ("tflops_median", "tflops_sustained", "copy_tb_per_second"))
    checks = files["smoke"]["checks"]
    assert f"correctness: {len(checks)} of {len(checks)} checks passed" in table
    assert {test["outcome"] for test in files["tests"]["tests"].values()} == {"skipped"}
    assert files["profile"]["kernels"][0]["ms"] > 0
    assert files["profile"]["head"]["toy"]["compiled_ms"] > 0
    for stage in gpu_sizes.SIZES:
        runs = files[stage]["runs"]
        expected = set(gpu.STAGES[stage][0].split(","))
        assert {run["contender"] for run in runs} == {run["contender"] for run in files[stage]["untimed"]} == expected
        assert all(run["tokens_per_second"] > 0 and run["graphs_compiled_while_timed"] == 0 for run in runs)
        assert {run["timed_micro_batches"] for run in runs} == {4}
        # 2 rows of 32 tokens in a micro-batch
        assert runs[0]["tokens_per_second"] == pytest.approx(64_000 / runs[0]["micro_batch_ms"])
        assert {share for run in runs for share in run["fp8_share"].values()} == {0.0}, "emulated fp8 runs in bf16"
        if "fsdp2" in expected:
            alone, sharded = runs[:2]
            assert sharded["last_loss"] == pytest.approx(alone["last_loss"], rel=1e-3)
            assert sharded["last_grad_norm"] == pytest.approx(alone["last_grad_norm"], rel=1e-2)
            assert f"| {stage} | fsdp2 | 0 | {sharded['last_loss']:.6f} |" in table
    assert [run["format"] for run in files["precision_proof"]["runs"]] == list(gpu_checks.PROOF)
    assert "| fp8_tensorwise | " in table
    assert "| llama7b: model FLOP/s over P, at least 0.82 | " in table
    assert not list(here.iterdir()), "measured runs have no logger"


def test_the_script_starts_its_stages_and_installs_the_wheels_beside_it(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "lightning_tricks").symlink_to(ROOT / "lightning_tricks")
    shutil.copytree(ROOT / "benchmarks", checkout / "benchmarks", ignore=shutil.ignore_patterns("results"))
    (checkout / ".whl").mkdir()
    wheel(checkout / ".whl", "sitecustomize", "print('from a wheel')")
    done = subprocess.run(
        [checkout / "benchmarks/gpu.sh", "--dry", "yardstick", "--limit", "3600"],
        env=os.environ | {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from a wheel" in done.stdout
    files = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert files.keys() == {"yardstick.json", "gpu.log", "summary.md"}
    assert files["summary.md"].strip() in done.stdout


def wheel(folder, name, source):
    """A wheel of one module, written by hand."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def training(out, contenders, *options):
    with pytest.raises(SystemExit) as ended:
        gpu_train.main(["llama7b", "--dry", "--out", str(out), "--contenders", contenders, *options])
    return ended.value.code, json.loads(out.read_text())


def test_a_contender_that_raises_costs_no_other(tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such kernel\nand a page more")

    monkeypatch.setitem(gpu_train.CONTENDERS, "stock", broken)
    code, result = training(tmp_path / "llama7b.json", "stock,bare,stock_again")
    assert code == 1
    assert [run["contender"] for run in result["runs"]] == ["bare"]
    error = "RuntimeError: no such kernel\nand a page more"
    assert result["failures"] == [{"round": None, "contender": "stock", "error": error}]
    assert "- llama7b, stock: RuntimeError: no such kernel" in gpu_table.summary([tmp_path], None)


class CrashError(BaseException):
    """Takes the place of a crash of the process."""


def crashing(contender, at):
    """The contender, but its `at`-th run crashes after it has ended."""
    calls = itertools.count(1)

    def run(*arguments):
        result = contender(*arguments)
        if next(calls) == at:
            raise CrashError
        return result

    return run


def without_a_row(contender):
    """The contender, but a run that is timed crashes before its clock has stopped."""

    def run(cli, batches, count, mark):
        if isinstance(mark, gpu_train.Window):
            raise CrashError
        return contender(cli, batches, count, mark)

    return run


def test_a_process_started_again_goes_on_after_what_ended_the_first(tmp_path, monkeypatch):
    out, ours = tmp_path / "llama7b.json", gpu_train.CONTENDERS["ours_loader"]
    monkeypatch.setitem(gpu_train.CONTENDERS, "ours_loader", without_a_row(ours))
    with pytest.raises(CrashError):
        training(out, "bare,ours,bare_again")
    assert gpu.interrupted(out)
    assert [run["contender"] for run in json.loads(out.read_text())["runs"]] == ["bare"]  # on disk at once
    assert "- llama7b: stopped in 0 ours" in gpu_table.summary([tmp_path], None)
    with pytest.raises(CrashError):
        training(tmp_path / "crashes.json", "ours")
    code, result = training(tmp_path / "crashes.json", "ours")
    assert (code, result["running"], len(result["failures"])) == (1, {}, 1)  # though nothing is left to run
    code, result = training(out, "bare,ours,bare_again")
    assert code == 1
    assert [run["contender"] for run in result["runs"]] == ["bare", "bare_again"]
    assert [failure["contender"] for failure in result["failures"]] == ["ours"]
    assert not gpu.interrupted(out)
    monkeypatch.setitem(gpu_train.CONTENDERS, "ours_loader", ours)
    monkeypatch.setattr(gpu, "run_limited", in_this_process)  # a later call tries again what failed, and no more
    monkeypatch.setitem(gpu.STAGES, "llama7b", ("bare,ours,bare_again", 60))
    assert gpu.run_stage("llama7b", tmp_path, True, time.monotonic() + 3600)
    result = json.loads(out.read_text())
    assert [run["contender"] for run in result["runs"]] == ["bare", "bare_again", "ours"]
    assert result["failures"] == []


def test_a_row_is_on_disk_when_its_clock_has_stopped_whatever_comes_after(tmp_path, monkeypatch):
    out = tmp_path / "llama7b.json"
    monkeypatch.setitem(gpu_train.CONTENDERS, "bare", crashing(gpu_train.CONTENDERS["bare"], at=2))
    with pytest.raises(CrashError):
        training(out, "bare")
    (row,) = json.loads(out.read_text())["runs"]
    assert row["tokens_per_second"] > 0


def test_lightning_moves_nothing_to_the_host_when_a_measured_run_ends(monkeypatch):
    moved = []
    strategy = sys.modules[pl.strategies.Strategy.__module__]
    monkeypatch.setattr(strategy, "_optimizers_to_device", lambda optimizers, device: moved.append(device))
    monkeypatch.setattr(pl.LightningModule, "cpu", lambda module: moved.append(module))
    fit(max_steps=1)
    assert len(moved) == 3  # state to the device, at the start; state and weights to the host, at the end
    with gpu_train.nothing_moves_to_the_host():
        fit(max_steps=1)
    assert len(moved) == 3
    fit(max_steps=1)
    assert len(moved) == 6


def test_nothing_keeps_the_model_of_a_run_that_has_ended(tmp_path, monkeypatch):
    parsers, models, load = [], [], gpu_train.load

    def kept(*arguments):
        cli = load(*arguments)
        parsers.append(cli.parser)  # as jsonargparse keeps it
        models.append(weakref.ref(cli.model))
        return cli

    monkeypatch.setattr(gpu_train, "load", kept)
    training(tmp_path / "llama7b.json", "ours")
    gc.collect()
    assert [model() for model in models] == [None, None]


def test_no_run_begins_that_is_not_likely_to_end_in_time(tmp_path, monkeypatch):
    out = tmp_path / "llama7b.json"
    stage = gpu_train.Stage("llama7b", out, True, 60.0)
    assert stage.expected_seconds("bare") == 0
    stage.result["runs"] = [{"contender": "ours", "run_seconds": 30.0}, {"contender": "bare", "run_seconds": 20.0}]
    assert (stage.expected_seconds("bare_again"), stage.expected_seconds("hand_blocks")) == (20, 30)
    monkeypatch.setattr(gpu_train.Stage, "expected_seconds", lambda stage, name: 3600.0 * len(stage.result["runs"]))
    code, result = training(out, "bare,bare_again", "--seconds", "3000")
    assert code == 0
    assert [run["contender"] for run in result["runs"]] == ["bare"]


def test_contenders_that_there_is_no_time_to_compile_are_left_out_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_train.Stage, "passed", lambda stage: 700.0 * len(stage.result["untimed"]))
    code, result = training(tmp_path / "llama7b.json", "bare,ours,bare_again", "--seconds", "1000")
    assert code == 0
    assert [run["contender"] for run in result["untimed"]] == ["bare"]
    assert [run["contender"] for run in result["runs"]] == ["bare", "bare_again"]
    assert "- llama7b: no time to compile ours" in gpu_table.summary([tmp_path], None)


def test_the_clock_runs_over_whole_log_intervals_for_as_long_as_it_should(monkeypatch):
    now, rows = [0.0], []
    monkeypatch.setattr(gpu_train.time, "perf_counter", lambda: now[0])
    size = gpu_sizes.Size("tiny", warmup=2, timed=2, seconds=10, rounds=1, accumulate=2, log_every=2)
    window = gpu_train.Window(size, [], described.DeviceState(), rows.append)
    for index in range(100):
        if window(index):
            break
        now[0] += 100 if index < 4 else 2  # the warm-up compiles
    assert index == 4 + 2 * 2 * 2, "a log interval of 8 s is too short, two are enough"
    (row,) = rows
    assert (row["timed_micro_batches"], row["timed_seconds"], row["micro_batch_ms"]) == (8, 16, 2000)
    assert row["warmup_seconds"] == 400


def test_the_peak_is_that_of_all_timed_steps_though_a_monitor_starts_new_ones(monkeypatch):
    held = iter([7.0, 9.0, 8.0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(held) * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    with gpu_train.whole_peak() as peaks:
        torch.cuda.reset_peak_memory_stats("cuda")
        torch.cuda.reset_peak_memory_stats()
        peaks.append(torch.cuda.max_memory_allocated() / 2**30)
    assert peaks == [7.0, 9.0, 8.0]


def test_each_round_begins_with_another_contender():
    assert gpu_train.order("ab", 2) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]


@pytest.mark.parametrize("name", gpu_sizes.SIZES)
def test_the_first_step_is_not_timed_and_monitors_measure_several_times(name):
    size = gpu_sizes.SIZES[name]
    assert size.warmup >= 2
    if "ours_watched" in gpu.STAGES[name][0]:
        assert size.warmup >= 2 * size.log_every
        assert size.timed >= 4 * size.log_every
    assert (size.warmup + size.timed) % size.log_every == 0, "so that the last step's loss is logged"


def test_every_stage_belongs_to_a_call_that_fits_into_its_limit():
    assert {stage for group in gpu.GROUPS.values() for stage in group} == gpu.STAGES.keys()
    for stages in gpu.GROUPS.values():
        # an early end of one stage gives its time to the next, so the last one may have a limit beyond the call's
        assert sum(gpu.STAGES[stage][1] for stage in stages[:-1]) < gpu.CALL_SECONDS
    assert 3 * gpu.CALL_SECONDS <= 30 * 60, "first, large and largest"


def test_every_file_with_tests_marked_gpu_is_named():
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert marked == set(gpu_tests.FILES)


TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip
def test_is_skipped(): pass
def test_crashes(): os._exit(7)
def test_hangs(): time.sleep(3600)
def test_comes_last(): pass
"""


def test_a_test_that_crashes_or_hangs_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_tests, "TEST_SECONDS", 3.0)
    (tmp_path / "test_some.py").write_text(TESTS)
    out = tmp_path / "tests.json"
    with pytest.raises(SystemExit) as ended:
        gpu_tests.run_tests(out, False, 3600.0, [str(tmp_path / "test_some.py")])
    assert ended.value.code == 1
    result = json.loads(out.read_text())
    outcomes = {name.rpartition("::")[2]: test["outcome"] for name, test in result["tests"].items()}
    assert outcomes == {
        "test_passes": "passed", "test_fails": "failed", "test_is_skipped": "skipped", "test_crashes": "failed",
        "test_hangs": "failed", "test_comes_last": "passed",
    }  # fmt: skip
    assert "tests marked gpu: 2 passed, 3 failed, 1 skipped, 0 not reached" in gpu_table.summary([tmp_path], None)


def test_tests_that_are_stopped_leave_the_outcomes_they_have(tmp_path, monkeypatch):
    out = tmp_path / "tests.json"

    def stopped_in_the_fourth(command, *, timeout, **options):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, **options)
        while "test_crashes" not in str(json.loads(out.read_text())["running"]):
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.wait()
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu_tests.subprocess, "run", stopped_in_the_fourth)
    (tmp_path / "test_some.py").write_text(TESTS.replace("os._exit(7)", "time.sleep(3600)"))
    with pytest.raises(SystemExit):
        gpu_tests.run_tests(out, False, 3600.0, [str(tmp_path / "test_some.py")])
    outcomes = [test["outcome"] for test in json.loads(out.read_text())["tests"].values()]
    assert outcomes == ["passed", "failed", "skipped"]
    said = gpu_table.summary([tmp_path], None)
    assert "1 passed, 1 failed, 1 skipped, 3 not reached" in said
    assert "test_crashes" in said


def test_a_stage_that_hangs_or_fails_costs_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "STAGES", {"hangs": ("", 60), "fails": ("", 60), "works": ("", 60)})
    monkeypatch.setattr(gpu, "GROUPS", {"first": ["hangs", "fails", "works"]})
    codes = {"hangs": None, "fails": 3, "works": 0}

    def run_limited(command, output, seconds):
        stage = command[command.index("--out") - 1]
        if stage == "works":
            (tmp_path / "yardstick.json").write_text(json.dumps({"size": 8, "tflops_median": 1.0}))
        print(f"{stage} was here", file=output, flush=True)
        return codes[stage]

    monkeypatch.setattr(gpu, "run_limited", run_limited)
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert stopped.value.code == 1
    assert "hangs: stopped at its limit of 60 s" in said
    assert "fails: FAILED, exit code 3" in said
    assert "fails was here" in said
    assert "works: done" in said
    assert "bf16 product of 8 cubed: 1 TFLOP/s" in (tmp_path / "summary.md").read_text()


def test_a_stage_is_left_out_when_the_time_is_used_up(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--out", str(tmp_path), "--limit", "1", "yardstick"])
    assert stopped.value.code == 1
    assert "yardstick: left out, the time is used up" in capsys.readouterr().out


def test_a_command_over_its_limit_is_killed_with_its_children(tmp_path):
    child = tmp_path / "child"
    script = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    assert gpu.run_limited([sys.executable, "-c", script], subprocess.DEVNULL, 3.0) is None
    pid = int(child.read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and alive(pid):
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (
            "gpt5",
            "unknown stage gpt5: give some of first large largest tests more yardstick smoke profile gpt2_124m llama1b",
        ),
        ("yardstick", "cannot import no_such_module nor_this: install them, or put their wheels into .whl"),
    ],
)
def test_what_cannot_run_is_named_before_anything_runs(stage, said, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_NEEDED", ("json", "no_such_module", "nor_this"))
    with pytest.raises(SystemExit) as stopped:
        gpu.main([stage])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_stage_that_crashed_is_started_again_for_what_it_had_to_do(tmp_path, monkeypatch):
    codes, result = iter([-11, gpu.DEVICE_LOST, 0]), tmp_path / "llama1b.json"

    def run_limited(command, output, seconds):
        code = next(codes)
        result.write_text(json.dumps({"running": {"contender": "ours"} if code == -11 else {}}))
        return code

    monkeypatch.setattr(gpu, "run_limited", run_limited)
    stop = time.monotonic() + 3600
    assert gpu.run_process("llama1b", "ours", result, tmp_path / "gpu.log", True, stop) == 0
    assert list(codes) == []


def test_a_signal_ends_the_stage_and_its_children_and_leaves_the_table(tmp_path):
    child = tmp_path / "child"
    stage = (
        "import os, subprocess, sys, time; sleep = 'import time; time.sleep(3600)';"
        "p = subprocess.Popen([sys.executable, '-c', sleep]);"
        f"open({str(child)!r} + '.part', 'w').write(str(p.pid)); os.rename({str(child)!r} + '.part', {str(child)!r});"
        "time.sleep(3600)"
    )
    script = (
        "import sys; from benchmarks import gpu; limited = gpu.run_limited;"
        f"gpu.run_limited = lambda command, *rest: limited([sys.executable, '-c', {stage!r}], *rest);"
        f"gpu.main(['--dry', '--limit', '3600', '--out', {str(tmp_path / 'out')!r}, 'yardstick'])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while not child.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    said, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert str(tmp_path / "out") in said
    assert (tmp_path / "out/summary.md").exists()
    pid = int(child.read_text())
    while alive(pid):
        time.sleep(0.05)


def test_temporary_folders_of_a_killed_stage_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    script = (
        "import os, sys, tempfile, torch._inductor.runtime.cache_dir_utils as c; folder = tempfile.mkdtemp();"
        f"open({str(tmp_path / 'said')!r}, 'w').write(folder + ' ' + c.cache_dir()); os.kill(os.getpid(), 9)"
    )
    assert gpu.run_limited([sys.executable, "-c", script], subprocess.DEVNULL, 3600.0) == -9
    folder, compiled = (tmp_path / "said").read_text().split()
    assert not Path(folder).exists()
    assert Path(compiled).parent == tmp_path  # what is compiled serves the next stage


def test_it_refuses_to_start_beside_another_process_on_the_gpu(tmp_path, monkeypatch, capsys):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho \"$@\" > $0.asked; echo '4711, python3, 70000 MiB'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--out", str(tmp_path / "out"), "yardstick"])
    assert stopped.value.code == 2
    assert "other processes compute on the GPU, end them first: 4711, python3, 70000 MiB" in capsys.readouterr().err
    assert "--id=3" in (tmp_path / "nvidia-smi.asked").read_text()
    assert not (tmp_path / "out").exists()


def test_a_second_call_goes_on_with_the_results_of_this_gpu_only(tmp_path):
    out = tmp_path / "yardstick.json"
    fresh = {"stage": "yardstick", "machine": {"gpu_uuid": "this one"}, "dry": False}
    assert stage_file.resume(out, fresh) is fresh
    stage_file.write(out, {**fresh, "size": 8192})
    assert stage_file.resume(out, fresh)["size"] == 8192
    for other in ({**fresh, "machine": {"gpu_uuid": "that one"}}, {**fresh, "dry": True}):
        with pytest.raises(SystemExit, match=r"has results of another (GPU|size): give another --out"):
            stage_file.resume(out, other)


def test_a_second_call_tries_again_what_failed():
    checks = [{"check": "a", "ok": True}, {"check": "b", "ok": False}]
    tests = {"x": {"outcome": "passed"}, "y": {"outcome": "failed"}, "z": {"outcome": "skipped"}}
    assert stage_file.to_try_again({"checks": checks, "running": "c"}) == {"checks": checks[:1], "running": None}
    assert stage_file.to_try_again({"tests": tests})["tests"].keys() == {"x", "z"}
    trained = {"runs": [1], "failures": [2], "left_out": ["ours"], "running": {"round": 0}}
    again = {"runs": [1], "failures": [], "left_out": [], "running": {}}
    assert stage_file.to_try_again(trained) == again


def test_a_failure_of_the_reference_costs_no_check_after_a_restart(tmp_path, monkeypatch):
    def no_device(*arguments, **options):
        raise RuntimeError("no device")

    out, names = tmp_path / "smoke.json", list(gpu_smoke.Smoke(False).checks())
    monkeypatch.setattr(gpu_smoke.Smoke, "fit", no_device)
    done = [{"check": names[0], "ok": True}]
    stage_file.write(out, {"stage": "smoke", "machine": described.describe(), "dry": True, "checks": done,
                           "running": None})  # fmt: skip
    with pytest.raises(SystemExit):
        gpu_smoke.run_checks(out, True, 3600.0)
    checks = json.loads(out.read_text())["checks"]
    assert [check["check"] for check in checks] == names
    assert [check["ok"] for check in checks] == [True, True, *[False] * (len(names) - 2)]  # attention needs no fit


def test_each_format_of_the_proof_has_room_for_graphs_of_its_own(tmp_path, monkeypatch):
    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(torch._dynamo.config.recompile_limit))
    monkeypatch.setattr(precision, "load", lambda *arguments: 1 / 0)
    for name in gpu_checks.PROOF:
        with pytest.raises(ZeroDivisionError):
            precision.main([name, "--device", "cpu", "--out", str(tmp_path / "proof.json")])
    assert resets == [64] * len(gpu_checks.PROOF)


def test_kernels_are_told_by_their_own_time():
    events = [SimpleNamespace(key=key, count=6, self_device_time_total=us) for key, us in
              (("short", 3000.0), ("long", 9000.0), ("host only", 0.0))]  # fmt: skip
    told = gpu_profile.kernels(events, "device")
    assert told == [{"name": "long", "ms": 3.0, "calls": 2.0}, {"name": "short", "ms": 1.0, "calls": 2.0}]
