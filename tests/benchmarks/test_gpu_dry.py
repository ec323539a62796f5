"""The GPU benchmark runs from end to end on a CPU at toy sizes, and a stage that fails costs no other."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from cli.parsers import no_hyper_parameters, one_parser  # noqa: F401, fixtures
from harness.preloaded import python

from benchmarks import gpu, gpu_checks, gpu_sizes, gpu_smoke, gpu_table, gpu_tests, gpu_train, precision

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
    "gpt2_124m": ["ours_watched,stock"], "llama1b": ["ours"], "precision_7b": ["lightning_bf16"],
    "precision_1b": ["fp8_rowwise"], "precision_124m": ["fp8_tensorwise,bf16_true"], "llama7b_1gpu": ["bare", "ours"],
    "fsdp2_124m": ["one_device,fsdp2"], "fsdp2_1b": ["bf16_mixed"],
}  # fmt: skip
SMALL = {"vocab_size": 272, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 32, "d_ff": 64}


def contenders_of(stages):
    return {
        gpu_train.plain(name) for processes in stages.values() for names, _ in processes for name in names.split(",")
    }


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
    every = contenders_of(gpu.STAGES)
    for stage, processes in FEWER.items():
        monkeypatch.setitem(gpu.STAGES, stage, [(contenders, 60) for contenders in processes])
    assert contenders_of(gpu.STAGES) == every
    for call, stages in gpu.GROUPS.items():
        with pytest.raises(SystemExit) as ended:
            gpu.main(["--dry", "--limit", "3600", "--out", str(tmp_path / call), call])
        assert ended.value.code == 0, (tmp_path / call / "gpu.log").read_text()
        written = {path.name for path in (tmp_path / call).iterdir()}
        assert written == {*(f"{stage}.json" for stage in stages), "gpu.log", "summary.md"}
        assert len(written) <= 8
        monkeypatch.setitem(gpu.STAGES, "yardstick", [])  # once is enough
        monkeypatch.setitem(gpu.GROUPS, "precision", [s for s in gpu.GROUPS["precision"] if s != "yardstick"])
        monkeypatch.setitem(gpu.GROUPS, "sharding", [s for s in gpu.GROUPS["sharding"] if s != "yardstick"])
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
    for stage in gpu_sizes.SIZES:
        runs = files[stage]["runs"]
        expected = {name for contenders, _ in gpu.STAGES[stage] for name in contenders.split(",")}
        assert {run["contender"] for run in runs} == expected
        assert all(run["tokens_per_second"] > 0 and run["graphs_compiled_while_timed"] == 0 for run in runs)
        # 2 rows of 32 tokens in a micro-batch
        assert runs[0]["tokens_per_second"] == pytest.approx(64_000 / runs[0]["micro_batch_ms"])
        assert {run["peak_dtype"] for run in runs} == {"bf16"}, "emulated fp8 has no peak of its own"
        if "fsdp2" in expected:
            alone, sharded = runs[:2]
            assert sharded["last_loss"] == pytest.approx(alone["last_loss"], rel=1e-3)
            assert sharded["last_grad_norm"] == pytest.approx(alone["last_grad_norm"], rel=1e-2)
            assert f"| {stage} | fsdp2 | 0 | {sharded['last_loss']:.6f} |" in table
    assert {run["format"] for run in files["precision_proof"]["runs"]} == {"fp8_tensorwise"}
    assert "| fp8_tensorwise | " in table


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
        gpu_train.main(["llama7b_1gpu", "--dry", "--out", str(out), "--contenders", contenders, *options])
    return ended.value.code, json.loads(out.read_text())


def test_a_contender_that_raises_costs_no_other(tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such kernel\nand a page more")

    monkeypatch.setitem(gpu_train.CONTENDERS, "stock", broken)
    code, result = training(tmp_path / "llama7b_1gpu.json", "stock,bare")
    assert code == 1
    assert [run["contender"] for run in result["runs"]] == ["bare"]
    assert result["failures"] == [
        {"round": 0, "contender": "stock", "error": "RuntimeError: no such kernel\nand a page more"}
    ]
    assert "- llama7b_1gpu, stock: RuntimeError: no such kernel" in gpu_table.summary([tmp_path], None)


def test_a_process_started_again_goes_on_after_what_ended_the_first(tmp_path, monkeypatch):
    class Crash(BaseException):
        pass

    def crash(*arguments):
        raise Crash

    out, ours = tmp_path / "llama7b_1gpu.json", gpu_train.CONTENDERS["ours_loader"]
    monkeypatch.setitem(gpu_train.CONTENDERS, "ours_loader", crash)
    with pytest.raises(Crash):
        training(out, "bare,ours,bare_again")
    assert gpu.interrupted(out)
    assert [run["contender"] for run in json.loads(out.read_text())["runs"]] == ["bare"]  # on disk at once
    assert "- llama7b_1gpu: stopped in 0 ours" in gpu_table.summary([tmp_path], None)
    with pytest.raises(Crash):
        training(tmp_path / "crashes.json", "ours")
    code, result = training(tmp_path / "crashes.json", "ours")
    assert (code, result["running"], len(result["failures"])) == (1, {}, 1)  # though nothing is left to run
    monkeypatch.setitem(gpu_train.CONTENDERS, "ours_loader", ours)
    code, result = training(out, "bare,ours,bare_again")
    assert code == 1
    assert [run["contender"] for run in result["runs"]] == ["bare", "bare_again"]
    assert [failure["contender"] for failure in result["failures"]] == ["ours"]
    assert not gpu.interrupted(out)


def test_no_run_begins_that_is_not_likely_to_end_in_time(tmp_path):
    assert gpu_train.expected_seconds([]) == 0
    assert gpu_train.expected_seconds([{"micro_batch_ms": 100.0, "micro_batches": 60}]) == 6 + 6
    code, result = training(tmp_path / "llama7b_1gpu.json", "bare,bare_again", "--seconds", "5")
    assert code == 0
    assert [run["contender"] for run in result["runs"]] == ["bare"]  # the second one may take 6 s to start


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
    if "ours_watched" in gpu.STAGES[name][0][0]:
        assert size.warmup >= 2 * size.log_every
        assert size.timed >= 4 * size.log_every
    assert (size.warmup + size.timed) % size.log_every == 0, "so that the last step's loss is logged"


def test_every_stage_belongs_to_a_call_that_fits_into_its_limit():
    assert {stage for group in gpu.GROUPS.values() for stage in group} == gpu.STAGES.keys()
    for stages in gpu.GROUPS.values():
        # an early end of one stage gives its time to the next, so the last one may have a limit beyond the call's
        assert sum(limit for stage in stages[:-1] for _, limit in gpu.STAGES[stage]) < gpu.CALL_SECONDS


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
        gpu_tests.run_tests(out, 3600.0, [str(tmp_path / "test_some.py")])
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
        gpu_tests.run_tests(out, 3600.0, [str(tmp_path / "test_some.py")])
    outcomes = [test["outcome"] for test in json.loads(out.read_text())["tests"].values()]
    assert outcomes == ["passed", "failed", "skipped"]
    said = gpu_table.summary([tmp_path], None)
    assert "1 passed, 1 failed, 1 skipped, 3 not reached" in said
    assert "test_crashes" in said


def run_of(contender, number, rate, memory=None):
    return {
        "contender": contender, "round": number, "tokens_per_second": rate, "micro_batch_ms": 1.0,
        "peak_allocated_gib": memory, "flops_per_token": {"causal": 4e9, "full": 5e9},
    }  # fmt: skip


def test_the_table_holds_medians_and_both_kinds_of_mfu():
    runs = [
        run_of("ours", 0, 90.0, 7.0),
        run_of("bare", 0, 100.0),
        run_of("bare", 1, 50.0),
        run_of("ours", 1, 40.0, 8.0),
    ]
    ours, bare = gpu_table.rows({"stage": "toy", "runs": runs}, peaks={"bf16": 1e12}, yardstick=0.5e12)
    assert ours["tokens_per_second"] == 65.0
    assert ours["mfu_causal"] == pytest.approx(65 * 4e9 / 1e12)
    assert ours["mfu_full"] == pytest.approx(65 * 5e9 / 1e12)
    assert ours["of_yardstick_causal"] == pytest.approx(65 * 4e9 / 0.5e12)
    assert ours["speed_against_base"] == pytest.approx((0.9 + 0.8) / 2)
    assert ours["peak_allocated_gib"] == 8.0
    assert ours["spread"] == pytest.approx(50 / 65)
    assert ours["against_base"] == "0.850 (0.800 to 0.900)"
    assert bare["speed_against_base"] == 1.0
    assert bare["peak_allocated_gib"] is None


def test_fp8_is_measured_against_its_own_peak_and_each_format_against_lightnings_bf16():
    fp8 = {**run_of("fp8_tensorwise", 0, 120.0), "peak_dtype": "fp8"}
    runs = {"stage": "precision_7b", "runs": [run_of("lightning_bf16", 0, 100.0), fp8]}
    bf16, fp8 = gpu_table.rows(runs, peaks={"bf16": 1e12, "fp8": 2e12}, yardstick=None)
    assert bf16["mfu_causal"] == pytest.approx(100 * 4e9 / 1e12)
    assert fp8["mfu_causal"] == pytest.approx(120 * 4e9 / 2e12)
    assert fp8["speed_against_base"] == pytest.approx(1.2)


def test_an_unknown_gpu_has_no_mfu_but_a_share_of_the_yardstick():
    (row,) = gpu_table.rows({"stage": "toy", "runs": [run_of("ours", 0, 90.0)]}, peaks={}, yardstick=1e12)
    assert row["mfu_causal"] is None
    assert row["mfu_full"] is None
    assert row["of_yardstick_full"] == pytest.approx(0.45)
    assert row["speed_against_base"] is None


def write(folder, stage, **figures):
    machine = {"gpu": "NVIDIA H200", "cpu": "a CPU", "date": "a day", "versions": {"torch": "2.11"}}
    (folder / f"{stage}.json").write_text(json.dumps({"stage": stage, "machine": machine, **figures}))


def test_the_summary_knows_the_gpu_whichever_stage_was_run(tmp_path):
    write(tmp_path, "llama1b", runs=[run_of("ours", 0, 98950.0)])
    row = "| llama1b | ours | 98,950 | - | 1.0 | - | 40.0% | 50.0% | - | - | - | 1 | - | - | - |"
    assert row in gpu_table.summary([tmp_path], None)
    assert "| 20.0% | 25.0% |" in gpu_table.summary([tmp_path], 2 * 989.5e12)
    write(tmp_path, "yardstick", size=8192, tflops_median=791.6)
    assert "bf16 product of 8192 cubed: 792 TFLOP/s, 80.0% of its peak 989.5" in gpu_table.summary([tmp_path], None)


def test_several_calls_make_one_table_each_against_its_own_yardstick(tmp_path):
    for name, tflops in (("cool", 800.0), ("warm", 400.0)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "yardstick", size=8192, tflops_median=tflops)
        write(tmp_path / name, "llama1b", runs=[run_of("ours", 0, 1e5)])
    table = gpu_table.summary([tmp_path / "cool", tmp_path / "warm"], None)
    assert table.count("| llama1b | ours |") == 2
    assert "| 50.0% | - |" in table  # 1e5 x 4 GFLOP of 800 TFLOP/s
    assert "| 100.0% | - |" in table


def test_figures_that_are_not_sound_are_named(tmp_path):
    run = run_of("ours", 1, 1e5) | {"graphs_compiled_while_timed": 2, "graph_breaks": 1}
    eager = run_of("bare", 0, 1e5) | {"compile_blocks": True, "graphs_compiled_in_warmup": 0}
    write(tmp_path, "gpt2_124m", runs=[run])
    write(tmp_path, "llama1b", runs=[eager])
    table = gpu_table.summary([tmp_path], None)
    assert "- gpt2_124m, ours, round 1: 2 graphs compiled while timed, 1 graph breaks" in table
    assert "- llama1b: compile_blocks is set and nothing was compiled" in table


def test_a_stage_that_hangs_or_fails_costs_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "STAGES", {"hangs": [("", 60)], "fails": [("", 60)], "works": [("", 60)]})
    monkeypatch.setattr(gpu, "GROUPS", {"first": ["hangs", "fails", "works"]})
    codes = {"hangs": None, "fails": 3, "works": 0}

    def run_limited(command, output, seconds):
        stage = command[command.index("--out") - 1]
        if stage == "works":
            write(tmp_path, stage, runs=[run_of("ours", 0, 1.0)])
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
    assert "| works | ours |" in (tmp_path / "summary.md").read_text()


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
            "unknown stage gpt5: give some of first precision sharding tests yardstick smoke gpt2_124m llama1b pre",
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
