"""The GPU benchmark runs from end to end on a CPU at toy sizes, and a stage that fails costs no other."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_dry_run_goes_through_every_stage(tmp_path):
    environment = os.environ | {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [ROOT / "benchmarks/gpu.sh", "--dry", "framework", "precision", "sharding"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert files.keys() == {*(f"{stage}.json" for stage in gpu.STAGES), "gpu.log", "summary.md"}
    assert files["summary.md"].strip() in done.stdout
    assert json.loads(files["yardstick.json"])["tflops_median"] > 0
    assert json.loads(files["tests.json"])["failed"] == 0 < json.loads(files["tests.json"])["skipped"]
    both = {"ours", "bare"}
    bf16 = {"lightning_bf16", "bf16_mixed", "fp8_tensorwise"}
    expected = {
        "gpt2_124m": both | {"ours_watched", "stock"}, "llama1b": both | {"stock"}, "llama7b_1gpu": both,
        "precision_124m": bf16 | {"bf16_true"}, "precision_1b": bf16 | {"bf16_true"},
        "precision_7b": bf16 | {"fp8_rowwise"}, "fsdp2_124m": {"one_device", "fsdp2"},
        "fsdp2_1b": {"one_device", "fsdp2"},
    }  # fmt: skip
    for stage, contenders in expected.items():
        runs = json.loads(files[f"{stage}.json"])["runs"]
        assert {run["contender"] for run in runs} == contenders
        assert all(run["tokens_per_second"] > 0 and run["graphs_compiled_while_timed"] == 0 for run in runs)
        # 2 rows of 32 tokens in a micro-batch
        assert runs[0]["tokens_per_second"] == pytest.approx(64_000 / runs[0]["micro_batch_ms"])
        assert {run["peak_dtype"] for run in runs} == {"bf16"}, "emulated fp8 has no peak of its own"
        if "fsdp2" in contenders:
            alone, sharded = runs[:2]
            assert sharded["last_loss"] == pytest.approx(alone["last_loss"], rel=1e-3)
            assert sharded["last_grad_norm"] == pytest.approx(alone["last_grad_norm"], rel=1e-2)
            assert f"| {stage} | fsdp2 | 0 | {sharded['last_loss']:.6f} |" in files["summary.md"]
    assert {run["format"] for run in json.loads(files["precision_proof.json"])["runs"]} == {"fp8_tensorwise", "fp32"}
    assert "| fp8_tensorwise | " in files["summary.md"]


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
    ours, bare = gpu.rows({"stage": "toy", "runs": runs}, peaks={"bf16": 1e12}, yardstick=0.5e12)
    assert ours["tokens_per_second"] == 65.0
    assert ours["mfu_causal"] == pytest.approx(65 * 4e9 / 1e12)
    assert ours["mfu_full"] == pytest.approx(65 * 5e9 / 1e12)
    assert ours["of_yardstick_causal"] == pytest.approx(65 * 4e9 / 0.5e12)
    assert ours["speed_against_base"] == pytest.approx((0.9 + 0.8) / 2)
    assert ours["peak_allocated_gib"] == 8.0
    assert bare["speed_against_base"] == 1.0
    assert bare["peak_allocated_gib"] is None


def test_fp8_is_measured_against_its_own_peak_and_each_format_against_lightnings_bf16():
    fp8 = {**run_of("fp8_tensorwise", 0, 120.0), "peak_dtype": "fp8"}
    runs = {"stage": "precision_7b", "runs": [run_of("lightning_bf16", 0, 100.0), fp8]}
    bf16, fp8 = gpu.rows(runs, peaks={"bf16": 1e12, "fp8": 2e12}, yardstick=None)
    assert bf16["mfu_causal"] == pytest.approx(100 * 4e9 / 1e12)
    assert fp8["mfu_causal"] == pytest.approx(120 * 4e9 / 2e12)
    assert fp8["speed_against_base"] == pytest.approx(1.2)


def test_every_stage_belongs_to_a_group():
    assert {stage for group in gpu.GROUPS.values() for stage in group} == gpu.STAGES.keys()


def test_an_unknown_gpu_has_no_mfu_but_a_share_of_the_yardstick():
    (row,) = gpu.rows({"stage": "toy", "runs": [run_of("ours", 0, 90.0)]}, peaks={}, yardstick=1e12)
    assert row["mfu_causal"] is None
    assert row["mfu_full"] is None
    assert row["of_yardstick_full"] == pytest.approx(0.45)
    assert row["speed_against_base"] is None


def write(folder, stage, **figures):
    machine = {"gpu": "NVIDIA H200", "cpu": "a CPU", "date": "a day", "versions": {"torch": "2.11"}}
    (folder / f"{stage}.json").write_text(json.dumps({"stage": stage, "machine": machine, **figures}))


def test_the_summary_knows_the_gpu_whichever_stage_was_run(tmp_path):
    write(tmp_path, "llama1b", runs=[run_of("ours", 0, 98950.0)])
    assert "| llama1b | ours | 98,950 | 1.0 | - | 40.0% | 50.0% | - | - | - | 1 |" in gpu.summary(tmp_path, None)
    assert "| 20.0% | 25.0% |" in gpu.summary(tmp_path, 2 * 989.5e12)
    write(tmp_path, "yardstick", size=8192, tflops_median=791.6)
    assert "bf16 product of 8192 cubed: 792 TFLOP/s, 80.0% of its peak 989.5" in gpu.summary(tmp_path, None)


def test_a_stage_that_hangs_or_fails_costs_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "STAGES", {"hangs": [("", 60)], "fails": [("", 60)], "works": [("", 60)]})
    monkeypatch.setattr(gpu, "GROUPS", {"framework": ["hangs", "fails", "works"]})
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


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["gpt5"])
    assert stopped.value.code == 2
    assert (
        "unknown stage gpt5: give some of framework precision sharding yardstick tests gpt2_124m llama1b llama7b_1gpu"
        in capsys.readouterr().err
    )
