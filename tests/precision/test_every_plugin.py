"""What each plugin promises alike: foreign modules unchanged, bitwise resume, exchangeable checkpoints, FSDP2."""

import functools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from foreign import PLUGINS, CausalLM, ShardedCausalLM, differing, rows, tensors, train
from harness import processes
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_tricks._core.errors import UsageError
from lightning_tricks.precision import AutoPrecision
from lightning_tricks.strategies import FSDP2Strategy

PLUGINS["mxfp8"]()  # what it imports takes long: here it is done once for all processes

# Share by which the last loss may differ from fp32's after nine steps, in which it falls by 15 %.
CLOSE = 0.01


class Run(NamedTuple):
    """What is left of nine steps of `CausalLM` in one process, with a checkpoint `step=3.ckpt`, `step=6.ckpt`."""

    losses: list[float]
    tensors: dict[str, torch.Tensor]
    plugin_state: dict[str, Any]
    folder: Path
    plugin: Any


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run under a plugin of that name, or in fp32 for the empty name; each name once."""

    @functools.cache
    def run(name: str) -> Run:
        model, plugin, folder = CausalLM(), PLUGINS[name]() if name else None, tmp_path_factory.mktemp("alone")
        trainer = train(model, plugin, epochs=3, folder=folder)
        return Run(model.losses, tensors(trainer, model), plugin.state_dict() if plugin else {}, folder, plugin)

    return run


@pytest.mark.parametrize("strategy", ["DeepSpeedStrategy", "FSDPStrategy"])
@pytest.mark.parametrize("name", [*PLUGINS, "auto"])
def test_a_strategy_with_a_precision_of_its_own_is_refused(name, strategy):
    plugin, module = {**PLUGINS, "auto": AutoPrecision}[name](), torch.nn.Linear(32, 32)
    module._trainer = SimpleNamespace(strategy=type(strategy, (), {"root_device": torch.device("cpu")})())
    said = (
        rf"^plugins: {type(plugin).__name__} does not work under {strategy}, which has a precision of its own: [^\n]*$"
    )
    with pytest.raises(UsageError, match=said):
        plugin.convert_module(module)
    assert module.weight.dtype == torch.float32


@pytest.mark.parametrize("name", PLUGINS)
def test_a_hugging_face_llama_trains_unchanged(name, alone):
    found, in_fp32 = alone(name).losses, alone("").losses
    assert in_fp32[-1] < 0.9 * in_fp32[0]
    assert found[-1] == pytest.approx(in_fp32[-1], rel=CLOSE)
    assert found != in_fp32, "the plugin did nothing"


@pytest.mark.parametrize("name", PLUGINS)
def test_after_a_fit_it_can_be_pickled_as_launchers_that_spawn_do(name, alone):
    run = alone(name)
    assert pickle.loads(pickle.dumps(run.plugin)).state_dict() == run.plugin_state


@pytest.mark.parametrize("name", PLUGINS)
def test_a_resume_is_bitwise(name, alone):
    straight, resumed, plugin = alone(name), CausalLM(), PLUGINS[name]()
    trainer = train(resumed, plugin, epochs=3, ckpt_path=straight.folder / "step=6.ckpt")
    assert resumed.losses == straight.losses[6:]
    assert not differing(tensors(trainer, resumed), straight.tensors)
    assert plugin.state_dict() == straight.plugin_state


@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "bf16_mixed"])
def test_a_checkpoint_opens_in_bf16_mixed_and_the_other_way_round(name, alone):
    for writer, reader in ((name, "bf16_mixed"), ("bf16_mixed", name)):
        saved = alone(writer).folder / "step=6.ckpt"
        checkpoint = torch.load(saved, weights_only=True)
        assert {type(value) for value in checkpoint["state_dict"].values()} == {torch.Tensor}
        assert list(checkpoint["state_dict"]) == list(CausalLM().state_dict())
        read = CausalLM()
        train(read, PLUGINS[reader](), ckpt_path=saved, max_steps=7, epochs=3)
        assert read.losses == pytest.approx(alone(writer).losses[6:7], rel=CLOSE)


# A foreign module that shards itself, saved to one file; one that knows nothing of it, saved to a folder.
SHARDED = {
    "itself": (ShardedCausalLM, lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)),
    "by FSDP2Strategy": (CausalLM, FSDP2Strategy),
}
# Who shards is nothing to a recipe of fp8, and a resume does not see which of its products are in fp8:
# test_float8_fsdp2.py trains all of torchao's, and resumes with weights that are gathered in fp8.
BY_ITSELF = ("fp16_mixed", "bf16_true")
BY_STRATEGY = ("bf16_mixed", "fp16_mixed", "bf16_true", "fp8_over_bf16_true", "mxfp8")
CASES = [*(("by FSDP2Strategy", name) for name in BY_STRATEGY), *(("itself", name) for name in BY_ITSELF)]


def under_fsdp2(rank: int, folder: str, alone: dict[str, list[float]]) -> None:
    """Four steps, and the fourth once more from the checkpoint of the third."""
    for who, name in CASES:
        (model, strategy), files = SHARDED[who], Path(folder) / name / who
        options = {"devices": 2, "data": rows(rank, 2), "max_steps": 4}
        straight, plugin = model(), PLUGINS[name]()
        trainer = train(straight, plugin, strategy=strategy(), folder=files, **options)
        resumed, again = model(), PLUGINS[name]()
        resumed_trainer = train(resumed, again, strategy=strategy(), ckpt_path=files / "step=3.ckpt", **options)
        different = differing(tensors(resumed_trainer, resumed), tensors(trainer, straight))
        assert not different, (name, who, different)
        assert resumed.losses == straight.losses[3:], (name, who)
        assert again.state_dict() == plugin.state_dict(), (name, who)
        mean = torch.tensor(straight.losses)
        torch.distributed.all_reduce(mean)
        torch.testing.assert_close(mean / 2, torch.tensor(alone[name]), rtol=CLOSE, atol=0)


@pytest.mark.long
def test_under_fsdp2_it_trains_as_alone_and_resumes_bitwise(alone, tmp_path):
    processes.run(under_fsdp2, str(tmp_path), {name: alone(name).losses[:4] for _, name in CASES})
