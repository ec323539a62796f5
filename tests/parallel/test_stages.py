"""Cutting a model into pipeline stages: all layers once, the slowest stage fast, and each refusal in one line."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from torch import nn
from torch.torch_version import TorchVersion

from lightning_tricks import GPT2, BF16Mixed, FSDP2Strategy, LanguageModel, Llama
from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import Decoder
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.parallel.parallelize import find_blocks
from lightning_tricks.parallel.pipeline import Pipeline, copy_on_meta, cut, find_pipelined, layers_of_stages, set_aside

SIZES = {"vocab_size": 64, "d_model": 32, "n_layers": 6, "n_heads": 4, "max_seq_len": 16}
CONFIG = Llama(**SIZES)


@pytest.fixture(autouse=True)
def _torch_of_all_schedules(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))


def counts(*args, **options):
    ranges = layers_of_stages(*args, **options)
    assert [layer for own in ranges for layer in own] == list(range(args[1])), "each layer once, in order"
    return [len(own) for own in ranges]


def test_layers_are_shared_out_so_that_no_stage_takes_longer_than_it_must():
    assert counts(1, 5) == [5]
    assert counts(4, 8) == [2, 2, 2, 2]
    assert counts(4, 8, head=1.0) == [2, 2, 2, 2], "one layer less on the last would make another one as slow"
    assert counts(4, 9, head=1.0) == [2, 2, 3, 2]
    assert counts(3, 7) == [2, 2, 3], "early stages, which hold most activations, get less"
    for stages in range(2, 9):
        for layers in range(stages, 40):
            for head in (0.0, 0.7, 2.5):
                *others, last = counts(stages, layers, head=head)
                # no other number on the last stage makes the slowest one faster
                choices = range(1, layers - stages + 2)
                slowest = [max(-(-(layers - own) // (stages - 1)), own + head) for own in choices]
                assert max(*others, last + head) == min(slowest)
    assert counts(3, 7, given=[4, 2, 1]) == [4, 2, 1]


@pytest.mark.parametrize(
    ("stages", "layers", "given", "line"),
    [
        (8, 6, None, "mesh.pipeline: 8 stages for 6 layers"),
        (2, 6, [3, 2], "layers_per_stage=[3, 2]: give 2 numbers of at least 1, one a stage, whose sum is 6"),
        (2, 6, [6], "layers_per_stage=[6]: give 2 numbers"),
        (2, 6, [6, 0], "layers_per_stage=[6, 0]: give 2 numbers"),
    ],
)
def test_layers_that_cannot_be_shared_out_are_refused(stages, layers, given, line):
    with pytest.raises(UsageError) as refused:
        layers_of_stages(stages, layers, given=given)
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_the_ranks_have_each_parameter_of_the_whole_model_once_under_its_name(schedule):
    whole = {name: parameter.shape for name, parameter in Decoder(CONFIG).named_parameters()}
    found = []
    for rank in range(2):
        model = Decoder(CONFIG)
        made = cut(model, rank, 2, schedule)
        found += [(name, parameter.shape) for name, parameter in model.named_parameters()]
        assert set(model.parameters()) == {p for stage in made.stages.values() for p in stage.parameters()}
    assert sorted(found) == sorted(whole.items())


def test_a_tied_head_has_its_copy_on_the_last_stage():
    config = GPT2(**SIZES)
    models = [Decoder(config) for _ in range(3)]
    cuts = [cut(model, rank, 3, "1F1B") for rank, model in enumerate(models)]
    assert [one.tied for one in cuts] == [["embed.weight"], [], ["embed.weight"]]
    assert models[2].head.weight is models[2].embed.weight
    with pytest.raises(UsageError, match=r"pipeline_schedule=DualPipeV: its first rank .* \('embed' is tied\)"):
        cut(Decoder(config), 0, 2, "DualPipeV")


class Misnamed(Decoder):
    plan: dict[str, str] = {}

    def pipeline_plan(self):
        return self.plan


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ({"embed": "first", "norm": "last"}, "pipeline_plan() does not say which stage has 'head.weight'"),
        ({"embed": "first", "nrom": "last"}, "pipeline_plan() says 'last' of 'nrom'"),
        ({"embed": "middle"}, "pipeline_plan() says 'middle' of 'embed': give modules, first or last"),
        ({"embed": "first", "head.weight": "last"}, "pipeline_plan() says 'last' of 'head.weight': give modules"),
    ],
)
def test_a_plan_with_a_fault_is_refused(plan, line, monkeypatch):
    monkeypatch.setattr(Misnamed, "plan", plan)
    with pytest.raises(UsageError) as refused:
        cut(Misnamed(CONFIG), 0, 2, "1F1B")
    assert line in str(refused.value)


class WithMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def pipeline_plan(self):
        return {}

    def stage(self, x, blocks, *, last, **inputs):
        return x

    def forward(self, x, mask=None, *, causal=True, **more):
        return x


def test_a_call_is_divided_by_its_names_and_refuses_tensors_without_the_rows():
    group = SimpleNamespace(size=lambda: 2)
    pipeline = Pipeline(cut(WithMore(), 0, 2, "1F1B"), group, "1F1B", 2, None, torch.device("cpu"))
    x, labels = torch.ones(4, 2), torch.ones(4)
    assert pipeline._inputs((x,), {"causal": False, "labels": labels}) == {"x": x, "causal": False, "labels": labels}
    for other in (torch.ones(2, 2), torch.tensor(1.0)):
        with pytest.raises(UsageError, match=r"mesh\.pipeline: 'mask' of shape \(.*\) has not the 4 rows"):
            pipeline(x, other)
    with pytest.raises(UsageError, match="a batch of 3 rows is no multiple"):
        pipeline(x[:3])


def test_the_loss_is_sent_in_fp32_whatever_the_default_type_is(monkeypatch):
    group, sent = SimpleNamespace(size=lambda: 2), []
    pipeline = Pipeline(cut(WithMore(), 0, 2, "1F1B"), group, "1F1B", 2, None, torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, **_: sent.append(tensor.dtype))
    monkeypatch.setattr(torch, "zeros", partial(torch.zeros, dtype=torch.bfloat16))  # as under bf16-true
    for losses in ([], [torch.ones((), dtype=torch.bfloat16)]):
        pipeline._joined(losses)
    assert sent == [torch.float32, torch.float32]


def test_blocks_are_matched_in_the_whole_model():
    model = nn.ModuleDict({"decoder": Decoder(CONFIG)})
    FSDP2Strategy().cut_stages(model, ParallelDims(pipeline=2).of_world(2), 1)
    assert list(find_blocks(model, [r"decoder\.blocks\.0", r"decoder\.blocks\.5"])) == ["decoder.blocks.5"]
    with pytest.raises(UsageError, match="matches no submodule"):
        find_blocks(model, [r"decoder\.blocks\.6"])


def test_a_model_without_the_methods_or_with_weights_beside_is_refused():
    with pytest.raises(UsageError, match=r"Linear cannot be cut into stages: give its model .* pipeline_plan\(\)"):
        find_pipelined(nn.Linear(2, 2))
    beside = nn.ModuleDict({"net": Decoder(CONFIG), "probe": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match=r"parameter 'probe\.weight' lies outside of 'net'"):
        find_pipelined(beside)
    assert find_pipelined(nn.ModuleDict({"net": Decoder(CONFIG)}))[0] == "net"


def test_a_copy_on_meta_has_names_ties_and_marks():
    model = Decoder(GPT2(**SIZES))
    model.embed.weight.note = "kept"
    made = copy_on_meta(model)
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))
    assert made.head.weight is made.embed.weight
    assert made.embed.weight.note == "kept"
    assert not any(tensor.is_meta for tensor in model.parameters())
    assert isinstance(made, Decoder)
    normed = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)))
    assert all(tensor.is_meta for tensor in copy_on_meta(normed).parameters())


def check(module, datamodule=None, stage="fit", plugin=None, pipeline=2, accelerator=None, **options):
    """As the command line does before it starts processes."""
    trainer = SimpleNamespace(
        num_nodes=1,
        num_devices=pipeline,
        lightning_module=module,
        precision_plugin=plugin,
        accelerator=accelerator or CPUAccelerator(),
    )
    FSDP2Strategy(mesh=ParallelDims(pipeline=pipeline), **options).check_run(trainer, datamodule, stage)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"compile_blocks": True, "pipeline_schedule": "ZBVZeroBubble"}, "compile_blocks: ZBVZeroBubble splits the ba"),
        (
            {"activation_checkpointing": "cheap", "pipeline_schedule": "DualPipeV"},
            "activation_checkpointing: DualPipeV splits the backward pass, for which torch keeps no results beside "
            "those that run again: take 1F1B or Interleaved1F1B, or none or full",
        ),
        ({"init_on_rank_0": True}, "init_on_rank_0: no rank can hold"),
        ({"reduce_gradients": "step"}, "reduce_gradients=step: stages reduce once a batch"),
        ({"save_distributed_checkpoint": False}, "save_distributed_checkpoint=False: no rank has all weights"),
        (
            {"datamodule": SimpleNamespace(micro_batch_size=6)},
            "data.micro_batch_size=6 is no multiple of pipeline_micr",
        ),
        ({"stage": "predict"}, "stages give a loss, and no logits"),
        ({"pipeline": 4, "pipeline_micro_batches": 3}, "pipeline_micro_batches=3: 1F1B on 4 pipeline ranks does not"),
        ({"pipeline_schedule": "DualPipeV", "pipeline_micro_batches": 3}, "pipeline_micro_batches=3: DualPipeV on 2"),
        (
            {"pipeline": 2, "pipeline_micro_batches": 5, "pipeline_schedule": "Interleaved1F1B"},
            "pipeline_micro_batches=5: Interleaved1F1B on 2 pipeline ranks does not take it",
        ),
        ({"pipeline": 8, "pipeline_micro_batches": 8}, "mesh.pipeline: 8 stages for 6 layers"),
        ({"layers_per_stage": [4, 4]}, "layers_per_stage=[4, 4]: give 2 numbers"),
        ({"layers_per_stage": [6, 0]}, "layers_per_stage=[6, 0]: give a list of whole numbers of at least 1, one a st"),
        ({"layers_per_stage": 3}, "layers_per_stage=3: give a list of whole numbers"),
        ({"layers_per_stage": "33"}, "layers_per_stage='33': give a list of whole numbers"),
        ({"pipeline_micro_batches": None}, "pipeline_micro_batches=None: give a whole number of at least 1"),
        ({"pipeline_micro_batches": 2.5}, "pipeline_micro_batches=2.5: give a whole number of at least 1"),
    ],
)
def test_what_stages_cannot_have_is_refused_before_any_process_is_started(options, line):
    with pytest.raises(UsageError) as refused:
        check(LanguageModel(CONFIG), **options)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_schedule_that_splits_the_backward_pass_needs_a_newer_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    with pytest.raises(UsageError, match=r"DualPipeV: splits the backward pass, which torch 2\.12\.1 cannot: "):
        check(LanguageModel(CONFIG), pipeline_schedule="DualPipeV")
    check(LanguageModel(CONFIG), pipeline_schedule="Interleaved1F1B")


def test_blocks_that_are_compiled_on_a_gpu_alone_are_refused_there():
    module = LanguageModel(CONFIG, compile_blocks="auto")
    check(module, pipeline_schedule="ZBVZeroBubble")
    with pytest.raises(UsageError, match="compile_blocks: ZBVZeroBubble splits"):
        check(module, pipeline_schedule="ZBVZeroBubble", accelerator=CUDAAccelerator())


def test_results_that_are_kept_are_refused_where_the_backward_pass_is_split():
    experts = Llama(**SIZES, n_experts=4)
    for decoder, kept in ((CONFIG, {"budget": 0.5}), (CONFIG, "selective"), (experts, "full")):
        module = LanguageModel(decoder, activation_checkpointing=kept)
        with pytest.raises(UsageError, match="activation_checkpointing: ZBVZeroBubble splits"):
            check(module, pipeline_schedule="ZBVZeroBubble")
        check(module, pipeline_schedule="1F1B")
    check(LanguageModel(CONFIG, activation_checkpointing="full"), pipeline_schedule="ZBVZeroBubble")


def test_one_layer_is_refused_as_such():
    with pytest.raises(UsageError, match=r"mesh\.pipeline: Decoder has no two layers alike"):
        check(LanguageModel(Llama(**{**SIZES, "n_layers": 1})))


def test_what_passes_count_is_set_aside_and_attributes_of_other_modules_are_let_alone():
    model = nn.Linear(1, 1)
    model.inner = nn.Linear(1, 1)
    model.loads = lambda: "a method of a user's"
    model.inner.backward_loads = counted = [1]
    with set_aside(model) as held:
        counted.append(2)
        model(torch.ones(1)).backward()
    assert counted == [1]
    assert held.counts == [(counted, [2])]
    assert {id(parameter) for parameter, _ in held.gradients} == {id(model.weight), id(model.bias)}
    assert model.weight.grad is None


def test_a_loss_scale_is_refused_and_bf16_is_not():
    from lightning.pytorch.plugins import MixedPrecision

    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(UsageError, match=r"trainer\.precision=16-mixed: its loss scaling"):
        check(LanguageModel(CONFIG), plugin=scaled)
    check(LanguageModel(CONFIG), plugin=BF16Mixed())
    with pytest.raises(UsageError, match=r"pipeline_micro_batches=0: give a whole number of at least 1"):
        FSDP2Strategy(pipeline_micro_batches=0)
