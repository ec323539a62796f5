"""`plan`: whether a recipe fits, how long it takes, what to change; figures by hand, and changes that hold."""

import dataclasses
import itertools
import json
import re
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import schedulefree
import torch
from cli.parsers import no_hyper_parameters, one_parser  # noqa: F401, fixtures
from commands.plan.test_memory_trace import really_kept
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_tricks import (
    EMA,
    BatchSizeWarmup,
    BF16Mixed,
    BF16True,
    Float8,
    FSDP2Strategy,
    LanguageModel,
    Llama,
    ParallelDims,
    ParamRule,
    SpikeRollback,
    TotalTokens,
)
from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting import recompute_flops_per_token, training_flops_per_token
from lightning_tricks.cli import load_recipe
from lightning_tricks.commands import recipes_folder
from lightning_tricks.commands.check.checks import Checked, layout, model, run_checks
from lightning_tricks.commands.plan import PlanOptions, run
from lightning_tricks.commands.plan.changes import changes_that_fit
from lightning_tricks.commands.plan.fake_cluster import at_once
from lightning_tricks.commands.plan.memory import DEPTHS, _trace_or_refuse
from lightning_tricks.commands.plan.memory_trace import FORWARD, LAST, LOSS, STEP, StepMemory
from lightning_tricks.commands.plan.plan import Links, step_time
from lightning_tricks.commands.plan.plan import plan_recipe as plan_with
from lightning_tricks.commands.plan.report import report
from lightning_tricks.commands.plan.setup import read_setup
from lightning_tricks.logs.table import size_text
from lightning_tricks.models import Decoder
from lightning_tricks.parallel.parallelize import Traffic

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_parser", "no_hyper_parameters")]
TINY = Llama(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_seq_len=32)
COUNT = 64 * 32 * 2 + 2 * (4 * 32 * 32 + 3 * 32 * 256 + 2 * 32) + 32


def data(rows=2, length=32, **more):
    return SimpleNamespace(micro_batch_size=rows, seq_len=length, **more)


def plan_recipe(*recipe, suggest=True, **options):
    return plan_with(*recipe, PlanOptions(**options), suggest=suggest)


def planned(config=TINY, settings=None, source=None, **options):
    module = LanguageModel(config, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3))
    return plan_recipe(module, source or data(), settings or {"max_steps": 10}, **options)


@pytest.fixture
def untraced(monkeypatch):
    """Of tests that look at nothing that a step's trace finds."""
    nothing = StepMemory({STEP: {"weights": 1}})
    monkeypatch.setattr("lightning_tricks.commands.plan.plan.traces_of", lambda setup: [lambda: nothing])


def recipe(name, *overrides):
    return load_recipe("--config", str(recipes_folder() / f"{name}.yaml"), *overrides)


def test_a_recipe_of_7b_fits_on_eight_gpus_of_80_gb_and_its_time_follows_from_the_stated_mfu():
    seven_b = plan_recipe(*recipe("llama7b"), gpu="h100", mfu=0.5, price=2.0)
    assert sum(seven_b.parameters.values()) == 6_738_415_616
    assert seven_b.active == 6_607_077_376
    assert seven_b.fits
    step = seven_b.memory.instants[STEP]
    shard = 4 * 6_738_415_616 / 8
    assert step["weights"] == pytest.approx(shard, rel=2e-3)  # and the tables of positions
    assert step["gradients"] == pytest.approx(shard, rel=1e-3)
    assert step["optimizer state"] == pytest.approx(2 * shard, rel=1e-3)
    assert 20 * 2**30 < seven_b.peak_bytes < 30 * 2**30
    rate = 0.5 * 989.5e12 * 8 / 46_080_000_000  # within a thousandth of the FLOPs that field tables give
    assert seven_b.tokens_per_second == pytest.approx(rate, rel=2e-3)
    assert seven_b.tokens == 480_000 * 4 * 4096 * 8 * 32
    assert seven_b.hours == pytest.approx(seven_b.tokens / seven_b.tokens_per_second / 3600)
    assert seven_b.gpu_hours == pytest.approx(8 * seven_b.hours)
    assert seven_b.cost == pytest.approx(2 * seven_b.gpu_hours)


WIDE = Llama(vocab_size=512, d_model=128, n_layers=8, n_heads=4, max_seq_len=128)
# traced once, and not at two depths
TWO_BLOCKS, THREE_BLOCKS, FIVE = (dataclasses.replace(WIDE, n_layers=depth) for depth in (2, 3, 5))


def mine(gigabytes):
    return {"gpu": "mine", "gpu_memory_gb": gigabytes, "peak_tflops": 1.0, "link_gb": 1.0}


def test_where_it_does_not_fit_each_change_that_is_named_makes_it_fit(monkeypatch):
    monkeypatch.setattr("lightning_tricks.commands.plan.plan.GPU_OVERHEAD", 0)
    whole = planned(FIVE, source=data(8, 128), **mine(1.0))
    assert whole.fits
    small = mine(0.8 * whole.memory.peak / 1e9)
    device = dataclasses.replace(whole.device, bytes=int(small["gpu_memory_gb"] * 1e9))
    plan = dataclasses.replace(whole, device=device)
    assert plan.fits is False
    changes = changes_that_fit(plan.setup, plan.memory, plan.device.bytes, most=2)
    assert changes[0].options == ("--data.micro_batch_size 4", "--trainer.accumulate_grad_batches 2")
    (option,) = changes[1].options
    budget = float(option.removeprefix("--model.activation_checkpointing.budget "))
    assert 0.5 < budget < 1
    assert changes[1].why == "norms and activations run again, no product does"
    module = LanguageModel(FIVE, {"budget": budget}, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3))
    again = plan_recipe(module, data(8, 128), {"max_steps": 10}, **small)
    assert again.fits
    assert again.memory.peak == changes[1].peak
    again = planned(FIVE, {"accumulate_grad_batches": 2}, data(4, 128), **small)
    assert again.fits
    assert again.memory.peak == changes[0].peak
    lines = report(dataclasses.replace(plan, changes=changes))
    assert all(" ".join(change.options) in lines for change in changes)
    assert "\n  memory              DOES NOT FIT: " in lines.partition("Model")[0], "the verdict comes first"
    assert " MiB too much\n  to make it fit      --data.micro_batch_size 4 " in lines
    told = dataclasses.replace(plan, changes=changes, device=dataclasses.replace(device, overhead=7)).as_dict()
    assert [change["peak_bytes"] for change in told["changes"]] == [change.peak + 7 for change in changes]


@pytest.mark.parametrize("config", [FIVE, dataclasses.replace(FIVE, n_experts=4, d_expert=64, dense_layers=2)])
def test_the_curve_of_budgets_is_that_of_their_traces_and_the_largest_that_fits_is_named(config, monkeypatch):
    def plan(mode="none", gigabytes=1.0, **options):
        module = LanguageModel(config, mode, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3))
        return plan_recipe(module, data(8, 128), {"max_steps": 10}, **mine(gigabytes), **options, suggest=False)

    monkeypatch.setattr("lightning_tricks.commands.plan.plan.GPU_OVERHEAD", 7)
    room = plan({"budget": 0.4}).memory.peak
    found = plan(gigabytes=(room + 8) / 1e9, budgets=True)
    curve = {one.budget: one for one in found.budgets}
    assert (len(curve), curve[1].peak_bytes) == (101, found.memory.peak)
    for figure, other in itertools.pairwise(found.budgets):
        assert other.peak_bytes <= figure.peak_bytes
        assert other.recomputed_fraction >= figure.recomputed_fraction
    block = (curve[1].peak_bytes - curve[0].peak_bytes) / config.n_layers
    assert curve[0.4].peak_bytes == pytest.approx(room, abs=block)
    best = found.largest_budget
    assert best.budget >= 0.4 - 1.2 / config.n_layers
    assert best.peak_bytes == plan({"budget": best.budget}).memory.peak <= room
    assert best.peak_bytes == pytest.approx(curve[best.budget].peak_bytes, abs=block)
    again = recompute_flops_per_token(config, 128, "causal", {"budget": best.budget})
    assert best.recomputed_fraction == again / training_flops_per_token(config, 128, "causal") > 0
    told = found.as_dict()
    assert told["largest_budget"] == best.budget
    assert told["budgets"][-1] == {**curve[0]._asdict(), "peak_bytes": curve[0].peak_bytes + 7}
    text = report(found)
    line = f"largest budget      activation_checkpointing: {{budget: {best.budget:g}}} fits: "
    assert line in text.partition("Model")[0]
    (full,) = re.findall(r"^  0  +[\d.]+ MiB +([\d.]+)%  (.+)$", text, re.M)
    assert float(full[0]) == round(100 * curve[0].recomputed_fraction, 1)
    assert full[1].count("#") < full[1].index("|") < 36


def test_budgets_of_a_module_that_is_not_ours_are_not_shown():
    found = plan_recipe(Foreign(), None, {"max_steps": 10, "accelerator": "cpu"}, budgets=True, suggest=False)
    assert found.memory is not None
    assert (found.budgets, found.largest_budget) == ((), None)


def test_state_that_is_too_large_is_divided_over_more_devices_or_offered_the_hosts_memory():
    """Bf16 weights, SGD and full checkpointing, so that no smaller state or activations are looked for."""
    module = LanguageModel(
        THREE_BLOCKS,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
        activation_checkpointing="full",
    )
    settings = {"strategy": FSDP2Strategy(), "precision": "bf16-true", "accumulate_grad_batches": 3, "max_steps": 10}
    whole = plan_recipe(module, data(1, 16), settings, suggest=False, **mine(1.0))
    changes = changes_that_fit(whole.setup, whole.memory, int(0.7 * whole.memory.peak))
    (more,) = (change for change in changes if change.options[0] == "--trainer.num_nodes 2")
    assert more.why == "2 times the devices, 2 times the rows of a step"
    assert more.peak < 0.65 * whole.memory.peak  # half of the state and of the step's copies, and what each rank has
    changes = changes_that_fit(whole.setup, whole.memory, int(0.4 * whole.memory.peak), most=1)
    assert changes[0].options == ("--trainer.strategy.init_args.cpu_offload true",)
    assert re.search(r"shards and optimizer take \d+ GiB of each host's memory$", changes[0].why)
    on_host = StepMemory({STEP: {"working memory": 1}}, host={"weights": 2**30})
    setup = dataclasses.replace(whole.setup, devices=2)
    lines = report(dataclasses.replace(whole, setup=setup, memory=on_host, changes=changes))
    assert "for 2 processes, each: weights 1.00 GiB" in lines
    assert "2.00 GiB for 2 processes" in lines


def test_every_line_of_a_small_model_is_that_of_arithmetic():
    callbacks = [EMA(decay=0.9), pl.callbacks.EMAWeightAveraging()]
    plan = planned(settings={"max_steps": 10, "accumulate_grad_batches": 4, "callbacks": callbacks})
    step = plan.memory.instants[STEP]
    tables = 2 * 4 * 32 * 16  # cosines and sines of 32 positions
    assert step["weights"] == 4 * COUNT + tables
    assert step["gradients"] == 4 * COUNT
    assert step["averages"] == 4 * COUNT + step["weights"]  # Lightning's copies the module as it is
    assert step["optimizer state"] == 8 * COUNT + 4 * 21
    assert plan.tokens_a_step == 2 * 32 * 4
    assert plan.as_dict()["peak_bytes"] == plan.memory.peak + plan.device.overhead


@pytest.mark.parametrize("accelerator", ["gpu", "cpu"])
def test_the_copies_of_spike_rollback_are_counted_where_they_lie(accelerator):
    callbacks = [SpikeRollback(keep_snapshots=3), EMA(decay=0.9)]
    plan = planned(settings={"max_steps": 10, "accelerator": accelerator, "callbacks": callbacks})
    step = plan.memory.instants[STEP]
    copies = 3 * (step["weights"] + step["optimizer state"] + step["averages"])
    if accelerator == "cpu":
        assert step["snapshots"] == copies
    else:
        assert plan.memory.host == {"snapshots": copies}
        assert plan.host_bytes == plan.setup.devices * copies


def test_shards_replicas_and_bf16_weights_change_the_lines_by_their_rule():
    whole = planned(devices=2).memory.instants[STEP]
    assert whole["communication"] == 4 * COUNT  # DDP's buckets
    sharded = planned(settings={"strategy": FSDP2Strategy()}, devices=2).memory.instants[STEP]
    assert sharded["gradients"] == pytest.approx(2 * COUNT, rel=0.01)
    assert "communication" not in sharded
    bf16 = planned(settings={"plugins": [BF16True()]}).memory.instants
    assert bf16[STEP]["gradients"] == 2 * COUNT
    assert bf16[STEP]["weights"] == pytest.approx(2 * COUNT, rel=0.05)  # tables of positions stay in fp32
    assert bf16[FORWARD]["optimizer state"] == 8 * COUNT + 4 * 21


@pytest.mark.parametrize(("precision", "bytes_each"), [("32-true", 4), ("16-true", 2), ("64-true", 8)])
def test_weights_are_counted_in_the_dtype_of_the_trainers_precision(precision, bytes_each):
    step = planned(settings={"precision": precision}).memory.instants[STEP]
    assert step["gradients"] == bytes_each * COUNT


@pytest.mark.usefixtures("untraced")
def test_the_length_of_a_run_may_be_in_tokens_and_its_batch_may_grow():
    assert planned(settings={"callbacks": TotalTokens(1000)}).tokens == 16 * 64  # the first step at which it has 1,000
    settings = {"max_steps": 10, "accumulate_grad_batches": 4, "callbacks": [BatchSizeWarmup({0: 1, 4: 2, 6: 4})]}
    assert planned(settings=settings).tokens == (4 * 1 + 2 * 2 + 4 * 4) * 64
    assert planned(settings=settings | {"callbacks": []}, gpu="h100", devices=2, nodes=2).tokens == 10 * 4 * 4 * 64


@pytest.mark.usefixtures("untraced")
def test_all_devices_are_those_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert planned(settings={"devices": -1}, gpu="h100").setup.world == 8


def test_the_loss_of_compiled_blocks_is_compiled_on_a_gpu():
    def head(compile_blocks):
        module = LanguageModel(dataclasses.replace(TINY, vocab_size=8192), compile_blocks=compile_blocks)
        plan = plan_recipe(module, data(8, 32), {"max_steps": 10, "plugins": [BF16Mixed()]}, gpu="h100")
        return plan.memory.instants[LOSS]["working memory"]

    # Both have the logits and their gradient in bf16. The eager loss has them in fp32 too, at a moment when there is no
    # product for the gradient of the weights yet.
    assert head(False) - head(True) == 4 * (8 * 32) * 8192 - 2 * 8192 * 32


def test_offloaded_shards_and_their_optimizer_are_counted_on_the_host():
    def memory(**options):
        settings = {"strategy": FSDP2Strategy(**options)}
        return planned(TWO_BLOCKS, settings, data(2, 128), devices=2, gpu="h100").memory

    here, there = memory(), memory(cpu_offload=True)
    tables = 2 * 4 * 128 * 32
    assert here.host == {}
    assert there.instants[STEP] == {"weights": tables}
    assert {line: there.host[line] for line in ("weights", "gradients")} == {
        "weights": here.instants[STEP]["weights"] - tables, "gradients": here.instants[STEP]["gradients"]
    }  # fmt: skip
    assert there.host["optimizer state"] == here.instants[STEP]["optimizer state"]
    # the rest is the same; while a block is gathered, its shards' copies are on the device too
    copies = 4 * (4 * 128 * 128 + 3 * 128 * 512 + 2 * 128) // 2
    own = ("gathered weights", "activations", "head and loss", "working memory")
    for name, more in {LOSS: 0, LAST: 0, "backward pass of head and loss": copies}.items():
        rest = [sum(one.instants[name].get(line, 0) for line in own) for one in (here, there)]
        assert rest[1] - rest[0] == more
        assert there.instants[name]["weights"] == tables
    assert any(note.startswith("cpu_offload: the time of copies") for note in there.notes)


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({}, {"activation_checkpointing": "full"}, 4096),
        ({"cpu_offload": True}, {"activation_checkpointing": "full"}, 4096),
        ({"reshard_after_forward": False, "reduce_gradients": "step"}, {"activation_checkpointing": "selective"}, 64),
    ],
)
def test_a_deep_model_told_from_two_shallow_ones_is_the_whole_one_to_the_byte(options, settings, words):
    config = dataclasses.replace(TINY, vocab_size=words, n_layers=7)
    module = LanguageModel(config, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3), **settings)
    trainer = {"strategy": FSDP2Strategy(**options), "accumulate_grad_batches": 2}
    setup = read_setup(module, data(), trainer, nodes=1, devices=2, on_gpu=True)
    four, five, whole = at_once([partial(_trace_or_refuse, setup, depth) for depth in (*DEPTHS, None)])
    told = four.at_depth(five, DEPTHS, config.n_layers)
    assert told is not None, "each plan would trace the whole model beside the two"
    assert (told.instants, told.host) == (whole.instants, whole.host)


def test_stages_are_planned_with_the_activations_that_they_hold_and_the_time_that_they_wait():
    def plan(**options):
        strategy = FSDP2Strategy(mesh=ParallelDims(pipeline=4), pipeline_micro_batches=8, **options)
        config = dataclasses.replace(TINY, n_layers=8)
        return planned(config, {"max_steps": 10, "strategy": strategy}, data(rows=8), devices=4, gpu="h100")

    one, gpipe = plan(), plan(pipeline_schedule="GPipe")
    assert one.whole.waits == pytest.approx(3 / 11)
    assert list(one.memory.ranks) == ["first", "middle", "last"]
    assert one.memory.peak == max(one.memory.ranks.values())
    # of 8 micro-batches the first rank holds 4 at a time under 1F1B; under GPipe each rank holds all
    more = gpipe.memory.ranks["first"] - one.memory.ranks["first"]
    assert more == pytest.approx(one.memory.instants[LOSS]["activations"], abs=16)
    assert one.memory.ranks["first"] > one.memory.ranks["middle"]
    (sent,) = [one for one in one.whole.traffic if one.axis == "pipeline"]
    assert sent.per_token == 2 * 32 * 4, "a hidden state and its gradient, in fp32"
    assert one.step_time().compute == pytest.approx(11 / 8 * 8 * 32 * one.flops_per_token / (4 * 0.4 * one.device.peak))
    mixture = dataclasses.replace(TINY, n_layers=8, n_experts=4, d_expert=16, dense_layers=2)  # none on the first rank
    strategy = FSDP2Strategy(mesh=ParallelDims(pipeline=4, expert=2), pipeline_micro_batches=8)
    shared = planned(mixture, {"max_steps": 10, "strategy": strategy}, data(rows=8), devices=16, gpu="h100")
    assert {each.axis for each in shared.whole.traffic if each.bytes(1)} == {"shard", "rest", "pipeline", "expert"}
    assert "expert shards" in report(shared)
    strategy = FSDP2Strategy(mesh=ParallelDims(pipeline=2), pipeline_micro_batches=8)
    sharded = planned(TINY, {"max_steps": 10, "strategy": strategy}, data(rows=8), devices=4, gpu="h100").whole
    (gathered,) = [each.gathered for each in sharded.traffic if each.axis == "shard"]
    assert gathered == 2 * sharded.weights, "the shards of two ranks, once a call"
    text = report(one)
    assert "ranks wait 27% of the time" in text
    assert "pipeline ranks      first 1.50 GiB, middle 1.50 GiB, last 1.50 GiB" in text


def test_compiled_blocks_are_counted_as_eager_and_a_note_says_so():
    def plan(compile_blocks, own=False):
        module = LanguageModel(TWO_BLOCKS, compile_blocks=compile_blocks)
        settings = {"strategy": FSDP2Strategy(compile_blocks=own), "max_steps": 10}
        return plan_recipe(module, data(2, 128), settings, devices=2, gpu="h100").memory

    eager, compiled, by_strategy = plan(False), plan(True), plan(False, own=True)
    assert eager.notes == ()
    assert compiled.notes == by_strategy.notes == ("blocks are compiled, and counted as eager: an upper bound",)
    assert by_strategy.instants == eager.instants
    assert compiled.instants[LOSS]["activations"] == eager.instants[LOSS]["activations"]


def fp8(**options):
    pytest.importorskip("torchao")
    return Float8(convert_small=True, **options)


def test_weights_that_are_gathered_in_fp8_take_half_and_send_half():
    def memory(plugin):
        module = LanguageModel(TWO_BLOCKS)
        settings = {"strategy": FSDP2Strategy(), "plugins": [plugin], "max_steps": 10}
        plan = plan_recipe(module, data(2, 128), settings, devices=2, gpu="h100")
        return plan.whole.traffic[0].gathered, plan.memory

    (bf16_sent, bf16), (sent, eight) = memory(BF16Mixed()), memory(fp8())
    block = 4 * 128 * 128 + 3 * 128 * 512  # elements in fp8
    assert bf16_sent - sent == 2 * 2 * block  # two blocks, gathered twice
    saved = bf16.instants[LAST]["gathered weights"] - eight.instants[LAST]["gathered weights"]
    assert saved == block  # of the one that is there
    assert eight.instants[STEP]["weights"] == bf16.instants[STEP]["weights"]
    assert eight.notes == ()


def test_what_products_in_fp8_keep_is_what_real_ones_keep():
    settings = {"plugins": [fp8(emulate=True)], "accelerator": "cpu", "max_steps": 10}
    plan = planned(TWO_BLOCKS, settings, data(2, 128))
    lines = plan.memory.instants[LOSS]
    module = Decoder(TWO_BLOCKS)
    fp8(emulate=True).convert_before_sharding(module, sharded=False)

    def loss_of(module):
        ids = torch.zeros(2, 128, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16):
            return module(ids, labels=ids)

    real = really_kept(module, loss_of)
    assert lines["activations"] + lines["head and loss"] == pytest.approx(real, rel=0.05)


def test_mxfp8_is_counted_as_bf16_and_a_note_says_so():
    settings = {"plugins": [fp8(recipe="mxfp8")], "max_steps": 10}
    (note,) = planned(TWO_BLOCKS, settings, data(2, 128), gpu="b200").memory.notes
    assert note.startswith("mxfp8's layers are counted as in bf16")


def test_kept_fp8_weights_are_named_in_a_note():
    settings = {"plugins": [fp8(keep_fp8_weights=True)], "max_steps": 10}
    (note,) = planned(TWO_BLOCKS, settings, data(2, 128)).memory.notes
    assert note.startswith("keep_fp8_weights: its 2 bytes")


def test_a_schedule_free_optimizer_steps_in_its_train_mode():
    module = LanguageModel(TINY, optimizer=lambda groups: schedulefree.AdamWScheduleFree(groups, lr=1e-3))
    step = plan_recipe(module, data(), {"max_steps": 10}, gpu="h100").memory.instants[STEP]
    assert step["optimizer state"] == 8 * COUNT  # z, and the average of squares


class Foreign(pl.LightningModule):
    def __init__(self, reads=False):
        super().__init__()
        self.net = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
        self.reads = reads

    def training_step(self, batch, batch_idx):
        loss = self.net(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss * (2 if self.reads and loss.item() > 3 else 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(torch.zeros(4, 16, dtype=torch.long), batch_size=4)


def test_a_module_never_seen_before_has_its_figures():
    plan = plan_recipe(Foreign(), None, {"max_steps": 10}, gpu="h100")
    count = sum(parameter.numel() for parameter in Foreign().parameters())
    step = plan.memory.instants[STEP]
    assert (step["gradients"], step["optimizer state"]) == (4 * count, 4 * count)
    assert plan.flops_per_token is None
    assert "a run with MFUMonitor counts them" in report(plan)


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0.00 KiB"), (2**20 - 2**19, "512.00 KiB"), (2**30 - 2**29, "512.00 MiB"), (2**40, "1,024.00 GiB")],
)
def test_sizes_have_the_unit_that_fits(size, shown):
    assert size_text(size) == shown


@pytest.mark.usefixtures("untraced")
def test_the_verdict_names_time_and_cost_or_the_option_that_is_missing():
    options = {"gpu": "h100", "devices": 2, "source": data()}
    text, priced = (
        report(dataclasses.replace(planned(**options), tokens=10**15, price=price)) for price in (None, 2.0)
    )
    hours = dataclasses.replace(planned(**options), tokens=10**15).gpu_hours
    assert (
        f" h on 2 x H100, at an MFU of 40%\n  cost                {hours:,.2f} device hours; --price, of one, " in text
    )
    assert f"  cost                {hours:,.2f} device hours at 2: {2 * hours:,.2f}\n" in priced
    assert "  time                not known, " in report(dataclasses.replace(planned(**options), tokens=None))


def test_frozen_parameters_are_told_from_trained_ones():
    module = Foreign()
    count = sum(parameter.numel() for parameter in module.parameters())
    module.net.requires_grad_(False)
    module.net.transformer.ln_f.requires_grad_(True)
    plan = plan_recipe(module, None, {"max_steps": 10}, gpu="h100")
    assert dict(plan.parameters) == {"norm": 64, "frozen": count - 64}
    lines = report(plan)
    assert f"parameters          {count:,}: frozen {count - 64:,}, norm 64\n  trained             64 of them\n" in lines


def test_a_module_that_reads_a_value_or_optimizes_manually_gets_a_line_and_the_rest_of_the_plan():
    manual = Foreign()
    manual.automatic_optimization = False
    for module, line in (
        (Foreign(reads=True), "Foreign: its step cannot run without data (DataDependentOutputException"),
        (manual, "memory              not known: Foreign optimizes manually, and only a run tells its steps"),
    ):
        plan = plan_recipe(module, None, {"max_steps": 10}, gpu="h100")
        assert plan.fits is None
        assert line in report(plan)


class ReadsWhileBuilt(Foreign):
    def configure_model(self):
        self.scale = torch.ones(1).item()


def test_a_module_that_cannot_be_built_without_data_is_one_line_in_a_plan_and_no_fault_for_check():
    with pytest.raises(UsageError, match=r"^ReadsWhileBuilt: configure_model does not work on the meta device \(.*"):
        plan_recipe(ReadsWhileBuilt(), None, {"max_steps": 10}, gpu="h100")
    (result,) = run_checks([model], Checked(ReadsWhileBuilt(), None, {}), lambda line: None)
    assert result.mark == "--"


def test_a_step_on_paper_hides_what_shards_send_and_adds_what_tensor_ranks_wait_for():
    dims = ParallelDims(tensor=2).of_world(16)  # eight shards on two hosts
    links = Links(host_gb=100.0, network_gb=10.0, devices=8)
    sends = [Traffic("shard", 8, gathered=16 * 10**9), Traffic("tensor", 2, per_token=1e6)]
    shards = 16e9 * 7 / 8 / (0.8 * 4 * 10e9)  # four of the eight GPUs of a host are in one group of shards
    tensor = 1e6 * 1000 / 2 / (0.8 * 100e9)
    assert links.is_on_network(dims, "shard")
    assert not links.is_on_network(dims, "tensor")
    hidden = step_time(3.0, 4, 1000, dims, sends, links)
    assert hidden.total == pytest.approx(4 * (3.0 + tensor))
    shown = step_time(0.1, 4, 1000, dims, sends, links)
    assert shown.total == pytest.approx(4 * (shards + tensor))
    assert shown.sends == pytest.approx({"shard": 4 * shards, "tensor": 4 * tensor})


def test_the_gpus_of_a_host_share_what_a_ring_brings_over_the_network_once():
    links = Links(host_gb=450.0, network_gb=50.0, devices=8)

    def speed(axis, world, **sizes):
        return links.speed(ParallelDims(**sizes).of_world(world), axis)

    assert speed("shard", 16) == 8 * 50
    assert speed("shard", 16, tensor=4) == 2 * 50
    assert speed("shard", 64, tensor=8) == 50  # one GPU of a host in each group: eight groups share its network
    assert speed("shard", 16, tensor=4, context=2) == 2 * 50
    assert speed("replicate", 16, replicate=2) == 50
    assert speed("replicate", 16, replicate=4) == 2 * 50
    assert speed("tensor", 16, tensor=16) == 8 * 50
    assert speed("tensor", 16, tensor=8) == speed("shard", 8) == 450
    assert dataclasses.replace(links, network_gb=100.0).speed(ParallelDims().of_world(16), "shard") == 450


@pytest.mark.parametrize(
    ("accelerator", "precision", "warning"),
    [("gpu", "bf16-true", None), ("gpu", "32-true", "takes 0.062 GiB"), ("cpu", "bf16-true", "takes up to 0.062 GiB")],
)
def test_documents_have_a_mask_only_where_nothing_else_serves(accelerator, precision, warning):
    config = dataclasses.replace(TINY, max_seq_len=8192, d_model=16, n_layers=1)
    settings = {"max_steps": 10, "precision": precision, "accelerator": accelerator}
    plans = [planned(config, settings, data(1, 8192, document_ids=on)) for on in (False, True)]
    assert (plans[1].memory.peak - plans[0].memory.peak >= 8192**2) == (warning is not None)
    said = [line for line in plans[1].warnings if "the mask is dense" in line]
    assert len(said) == (warning is not None)
    assert all(f"{warning} a micro-batch" in line for line in said)


@pytest.mark.usefixtures("untraced")
def test_settings_that_look_wrong_are_named():
    config = dataclasses.replace(TINY, vocab_size=65)
    module = LanguageModel(config)
    plan = plan_recipe(module, data(document_ids=True), {"max_steps": 100}, gpu="h100")
    assert any("vocab_size=65 is no multiple of 64: 128 is faster" in line for line in plan.warnings)


@pytest.mark.usefixtures("untraced")
def test_other_devices_than_the_recipes_change_the_rows_of_a_step_and_the_options_that_keep_them_are_named():
    def said(settings, **options):
        plan = planned(
            settings={"max_steps": 9, "strategy": "ddp", "accumulate_grad_batches": 6, **settings}, **options
        )
        return [line for line in plan.warnings if "rows" in line]

    half = "0.5 times the recipe's rows a step, on 4 devices in place of 8: "
    keep = "--trainer.devices 4 --trainer.num_nodes 1 --trainer.accumulate_grad_batches 12"
    assert said({"devices": 8}, devices=4) == [f"{half}{keep} keep them"]
    assert said({"devices": 4, "accumulate_grad_batches": 12}) == []
    assert said({"devices": 8, "num_nodes": 1}, nodes=2)[0].endswith(
        ": --trainer.devices 8 --trainer.num_nodes 2 --trainer.accumulate_grad_batches 3 keep them"
    )
    assert said({"devices": 8}, devices=5) == ["0.625 times the recipe's rows a step, on 5 devices in place of 8"]
    assert said({"devices": "auto"}, devices=4) == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"price": -1.0}, "plan: price=-1: give the price of a GPU hour, 0 or more"),
        ({"mfu": 40.0}, "plan: mfu=40: give a share of the peak above 0 and up to 1, such as 0.4"),
        ({"gpu": "h1000"}, "gpu=h1000: did you mean h100"),
        ({"devices": 0}, "plan: devices=0: give a number above 0"),
        ({"link_gb": 0.0}, "plan: link_gb=0: give a number above 0"),
        ({"settings": {"strategy": "fsdp"}, "devices": 2}, "plan: trainer.strategy=fsdp: the plan knows ddp, FSDP2"),
        (
            {"settings": {"strategy": FSDP2Strategy(mesh=ParallelDims(tensor=4))}, "devices": 2},
            "mesh: tensor 4 does not divide the 2 devices",
        ),
        ({"source": SimpleNamespace()}, "plan: data=SimpleNamespace: the plan needs its micro_batch_size and seq_len"),
    ],
)
def test_bad_input_is_one_line(options, line):
    with pytest.raises(UsageError, match=re.escape(line)):
        planned(**options)


@pytest.mark.usefixtures("untraced")
def test_a_gpu_has_the_figures_that_were_given_or_those_of_the_table(monkeypatch):
    plan = planned(gpu="mine", gpu_memory_gb=10.0, peak_tflops=100.0, link_gb=20.0)
    assert (plan.device.bytes, plan.device.peak, plan.links.host_gb) == (10**10, 1e14, 20.0)
    assert planned(gpu="h100").device.peak == 67e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert planned(gpu="h100").device.peak == 494.5e12  # of TF32


def test_the_command_prints_the_plan_writes_json_and_ends_with_1_where_it_does_not_fit(tmp_path, capsys, monkeypatch):
    file = tmp_path / "plan.json"
    module, settings = LanguageModel(TINY), {"max_steps": 10, "strategy": FSDP2Strategy()}
    options = {"gpu": "h100", "devices": 8, "nodes": 2}
    with pytest.raises(SystemExit) as end:
        run(module, data(), settings, **options, json=str(file))
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert re.search(r"^  shard +16 ranks, between hosts, 400 GB/s", out, re.M)
    assert json.loads(file.read_text())["mesh"] == "shard 16"
    device = {"name", "bytes", "peak_flops_per_second", "link_gb_per_second", "overhead_bytes", "source"}
    assert json.loads(file.read_text())["device"].keys() == device
    assert (module.decoder, module.config, settings["strategy"].mesh) == (None, TINY, None)  # nothing is changed
    with pytest.raises(SystemExit):
        run(module, data(), settings, **options, json="-")
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    monkeypatch.setattr("lightning_tricks.commands.plan.plan.changes_that_fit", None)  # no change makes the room
    with pytest.raises(SystemExit) as end:
        run(LanguageModel(TINY), data(), settings, gpu="mine", gpu_memory_gb=1.0, peak_tflops=1.0, link_gb=1.0)
    assert end.value.code == 1


def test_a_rule_for_a_single_block_is_planned():
    rules = [ParamRule(r"blocks\.7\.", lr_scale=2.0)]
    module = LanguageModel(dataclasses.replace(TINY, n_layers=8), param_rules=rules)
    assert plan_recipe(module, data(), {"max_steps": 10}, gpu="h100", suggest=False).memory is not None


@pytest.mark.parametrize("freeze", [["embed"], [r"blocks\.7\.", "role=head"]])
def test_frozen_parameters_have_neither_gradients_nor_state_also_where_single_blocks_are_named(freeze):
    config = dataclasses.replace(TINY, n_layers=8)
    built, planned_one, checked = (
        LanguageModel(config, freeze=freeze, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3))
        for _ in range(3)
    )
    plan = plan_recipe(planned_one, data(), {"max_steps": 10}, gpu="h100", suggest=False)
    built.configure_model()
    trained = sum(one.numel() for one in built.parameters() if one.requires_grad)
    assert 0 < plan.parameters["frozen"] == sum(one.numel() for one in built.parameters()) - trained
    step = plan.memory.instants[STEP]
    assert step["gradients"] == 4 * trained
    assert step["optimizer state"] == pytest.approx(8 * trained, rel=1e-3)
    assert ", as if nothing were frozen" in report(plan)
    settings = {"accelerator": "cpu", "devices": 2, "strategy": FSDP2Strategy()}
    assert "of 2 devices: ranks" in layout(Checked(checked, data(), settings))
