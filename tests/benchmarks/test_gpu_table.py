"""The figures of the GPU benchmark's table are those worked out by hand, and what is not sound is named."""

import json

import pytest

from benchmarks import gpu_table
from benchmarks.gpu_table import Limits


def run_of(contender, number, rate, memory=None, **more):
    return {
        "contender": contender, "round": number, "tokens_per_second": rate, "micro_batch_ms": 1.0,
        "peak_allocated_gib": memory, "flops_per_token": {"causal": 4e9, "full": 5e9}, **more,
    }  # fmt: skip


def stage_of(name, *runs, **more):
    return {"stage": name, "untimed": [], "runs": runs, "failures": [], **more}


def test_the_table_holds_medians_and_both_kinds_of_mfu():
    runs = run_of("ours", 0, 90.0, 7.0), run_of("bare", 0, 100.0), run_of("bare", 1, 50.0), run_of("ours", 1, 40.0, 8.0)
    ours, bare = gpu_table.rows(stage_of("toy", *runs), peaks=Limits(1e12), yardstick=Limits(0.5e12))
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


def test_work_in_two_types_is_measured_against_the_peaks_of_both_by_their_shares():
    # a quarter of the work in fp8: 0.25 / 2 + 0.75 / 1 seconds for 1e12 FLOP
    assert Limits(1e12, 2e12).mixed(0.25) == pytest.approx(1e12 / 0.875)
    assert Limits(1e12, 2e12).mixed(0.0) == 1e12
    assert Limits(1e12).mixed(0.25) is None
    # of GPT-2 124M, where 22.9 % of the work is in fp8 on an H200
    assert Limits(989.5e12, 1979e12).mixed(0.229) == pytest.approx(1117.4e12, rel=1e-4)
    fp8 = run_of("fp8_tensorwise", 0, 120.0, fp8_share={"causal": 0.5, "full": 0.4})
    limits = Limits(1e12, 2e12), Limits(0.8e12, 1.2e12), Limits(0.7e12)
    ours, fp8 = gpu_table.rows(stage_of("llama7b", run_of("ours", 0, 80.0), fp8), *limits, {"fp8_tensorwise": 0.9})
    assert ours["mfu_causal"] == pytest.approx(80 * 4e9 / 1e12)
    assert fp8["mfu_causal"] == pytest.approx(120 * 4e9 * (0.5 / 2e12 + 0.5 / 1e12))
    assert fp8["mfu_full"] == pytest.approx(120 * 5e9 * (0.4 / 2e12 + 0.6 / 1e12))
    assert fp8["of_yardstick_causal"] == pytest.approx(120 * 4e9 * (0.5 / 1.2e12 + 0.5 / 0.8e12))
    assert fp8["of_sustained_causal"] is None
    assert fp8["fp8_share"] == 0.5
    assert fp8["speed_against_base"] == 1.5
    assert fp8["at_equal_loss"] == pytest.approx(1.35)
    assert "at_equal_loss" not in ours


def test_both_runs_of_a_contender_in_a_round_are_its_base():
    runs = run_of("ours", 0, 90.0), run_of("bare", 0, 100.0), run_of("ours_again", 0, 110.0)
    fp8 = run_of("fp8_tensorwise", 0, 150.0)
    *_, row = gpu_table.rows(stage_of("toy", *runs, fp8), Limits(None), Limits(None))
    assert row["speed_against_base"] == 1.5
    assert gpu_table.step_over_bare(stage_of("toy", *runs)) == 1.0
    assert gpu_table.step_over_bare(stage_of("toy", run_of("ours", 0, 80.0), run_of("bare", 0, 100.0))) == 1.25
    assert gpu_table.step_over_bare(stage_of("toy", run_of("ours", 0, 80.0))) is None


def test_the_steps_that_a_format_is_behind_are_those_of_its_distance_over_the_slope():
    base = {"loss": [4.0 - 0.1 * i for i in range(30)]}  # falls by 0.1 in each of 30 parts
    behind = {"loss": [loss + 0.15 for loss in base["loss"]]}
    assert gpu_table.at_equal_loss(behind, base) == pytest.approx(1 - 1.5 / 30)
    assert gpu_table.at_equal_loss(base, base) == 1.0
    assert gpu_table.at_equal_loss(base, behind) == 1.0
    assert gpu_table.at_equal_loss({"loss": [9.0] * 30}, base) == 0.0
    assert gpu_table.at_equal_loss({"loss": [3.1] * 30}, {"loss": [3.0] * 30}) == 0.0, "such a loss never comes"
    proof = {
        "runs": [{"format": "bf16_mixed", **base}, {"format": "fp8_rowwise", **behind}, {"format": "fp16", **base}]
    }
    assert gpu_table.equal_losses([{}, {"precision_proof": proof}]) == {"fp8_rowwise": pytest.approx(0.95)}


def test_an_unknown_gpu_has_no_mfu_but_a_share_of_the_yardstick():
    (row,) = gpu_table.rows(stage_of("toy", run_of("ours", 0, 90.0)), Limits(None), Limits(1e12))
    assert row["mfu_causal"] is None
    assert row["mfu_full"] is None
    assert row["of_yardstick_full"] == pytest.approx(0.45)
    assert row["speed_against_base"] is None


def write(folder, stage, *runs, gpu="NVIDIA H200", **figures):
    machine = {"gpu": gpu, "cpu": "a CPU", "date": "a day", "versions": {"torch": "2.11"}}
    result = stage_of(stage, *runs) if runs else {"stage": stage}
    (folder / f"{stage}.json").write_text(json.dumps({**result, "machine": machine, **figures}))


def row_of(table, *first):
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {' | '.join(first)} |"))
    titles = [title for title, _ in gpu_table.COLUMNS.values()]
    return dict(zip(titles, line.strip("| ").split(" | "), strict=True))


def test_the_summary_knows_the_gpu_whichever_stage_was_run(tmp_path):
    write(tmp_path, "llama1b", run_of("ours", 0, 98950.0))
    row = row_of(gpu_table.summary([tmp_path], None), "llama1b", "ours")
    assert (row["tokens/s"], row["MFU causal"], row["MFU full"], row["rounds"]) == ("98,950", "40.0%", "50.0%", "1")
    assert row["of yardstick"] == row["W"] == row["spread"] == "-"
    assert "| 20.0% | 25.0% |" in gpu_table.summary([tmp_path], 2 * 989.5e12)
    write(tmp_path, "yardstick", size=8192, tflops_median=791.6, copy_tb_per_second=4.2)
    table = gpu_table.summary([tmp_path], None)
    assert "bf16 product of 8192 cubed: 792 TFLOP/s, 80.0% of 989.5" in table
    assert "copy on the device: 4.2 TB/s read and written of 4.8 TB/s" in table


def test_several_calls_make_one_table_each_against_its_own_yardstick(tmp_path):
    for name, tflops in (("cool", 800.0), ("warm", 400.0)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "yardstick", size=8192, tflops_median=tflops)
        write(tmp_path / name, "llama1b", run_of("ours", 0, 1e5))
    table = gpu_table.summary([tmp_path / "cool", tmp_path / "warm"], None)
    assert table.count("| llama1b | ours |") == 2
    assert "| 50.0% | - |" in table  # 1e5 x 4 GFLOP of 800 TFLOP/s
    assert "| 100.0% | - |" in table


def test_goals_stand_beside_what_was_measured(tmp_path):
    write(tmp_path, "yardstick", size=8192, tflops_median=800.0)
    fp8 = run_of("fp8_tensorwise", 0, 1.4e5, fp8_share={"causal": 0.9, "full": 0.8})
    write(tmp_path, "llama7b", run_of("ours", 0, 1e5), run_of("bare", 0, 1.004e5), fp8)
    write(tmp_path, "llama1b", run_of("ours", 0, 1.6e5), run_of("bare", 0, 1.7e5))
    peaks = {"peak_warmup_gib": 60.0}
    write(tmp_path, "memory_7b", run_of("ours_bf16_state", 0, 1.0, 55.0, **peaks), run_of("stock_hand", 0, 1.0, 125.0))
    table = gpu_table.summary([tmp_path], None)
    for line in (
        "| llama7b: model FLOP/s over P, at least 0.82 | 0.5 | missed by 0.32 |",
        "| llama1b: model FLOP/s over P, at least 0.75 | 0.8 | yes |",
        "| gpt2_124m: model FLOP/s over P, at least 0.58 | not measured | - |",
        "| llama7b: fp8 over bf16, tokens/s, at least 1.35 | 1.4 | yes |",
        "| llama8b: fp8 over bf16, tokens/s, at least 1.35 | not measured | - |",
        "| llama7b: step over that of the bare loop at most 1.005 | 1.004 | yes |",
        "| llama1b: step over that of the bare loop at most 1.005 | 1.062 | missed by 0.058 |",
        "| memory_7b: peak over stock Lightning's at most 0.5 | 0.48 | yes |",
    ):
        assert line in table


def test_figures_that_are_not_sound_are_named(tmp_path):
    run = run_of("ours", 1, 1e5, graphs_compiled_while_timed=2, graph_breaks=1, timed_seconds=9.0, attention="CUDNN")
    eager = run_of("bare", 0, 1e5, compile_blocks=True, attention="CUDNN_ATTENTION", left_gib=3.0)
    failed = {"failures": [{"contender": "ours", "error": "No kernel\nand more"}], "left_out": ["hand_blocks"]}
    machine = {"gpu": "NVIDIA H200", "cpu": "a CPU", "date": "a day", "versions": {"torch": "2.11"}, "nvml": False}
    write(tmp_path, "gpt2_124m", run)
    write(tmp_path, "llama1b", eager, untimed=[{"contender": "bare", "graphs": 0}], machine=machine, **failed)
    write(tmp_path, "precision_proof", machine=machine,
          runs=[{"format": "fp16", "bits_per_byte": 2.0, "graphs": 0, "loss": [1.0], "last_loss": 1.0}])  # fmt: skip
    found = gpu_table.summary([tmp_path], None).partition("To look at:\n")[2].splitlines()
    assert found == [
        "- MHz and W are missing: torch reads them by the package nvidia-ml-py, which is not installed",
        "- precision_proof, fp16: nothing was compiled",
        "- gpt2_124m, ours, round 1: 2 graphs compiled while timed, 1 graph breaks",
        "- gpt2_124m, ours, round 1: the clock ran for 9.0 s only",
        "- gpt2_124m, ours, round 1: attention by CUDNN, not by cuDNN",
        "- llama1b, ours: No kernel",
        "- llama1b: no time to compile hand_blocks",
        "- llama1b, bare: left 3.0 GiB on the device",
        "- llama1b: compile_blocks is set and nothing was compiled",
    ]


def test_the_longest_kernels_and_the_head_have_a_table(tmp_path):
    kernels = [{"name": f"kernel_{i}", "ms": 20.0 - i, "calls": 12.0} for i in range(20)]
    head = {"llama8b": {"shape": [8192, 4096, 128256], "eager_ms": 60.0, "compiled_ms": 40.0, "products_ms": 35.0}}
    write(tmp_path, "profile", kernels=kernels, head=head)
    table = gpu_table.summary([tmp_path], None)
    assert "| kernel_0 | 20.00 | 12 |" in table
    assert "kernel_12" not in table
    assert "| llama8b | 8192 x 4096 x 128256 | 60.00 | 40.00 | 35.00 |" in table
