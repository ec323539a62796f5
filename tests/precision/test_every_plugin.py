"""What each plugin promises alike: foreign modules unchanged, bitwise resume, exchangeable checkpoints, FSDP2."""

import sys
from pathlib import Path

import pytest
import torch
import two_processes
from lightning.pytorch.strategies import ModelParallelStrategy

sys.path.insert(0, str(Path(__file__).parent))  # also in the processes that the tests start
from foreign import PLUGINS, CausalLM, ShardedCausalLM, differing, rows, tensors, train

from lightning_tricks.strategies import FSDP2Strategy

# Share by which the last loss may differ from fp32's after thirty steps; emulated fp8 has 3 bits of mantissa.
CLOSE = {name: 0.12 if "fp8" in name else 0.03 for name in PLUGINS}


@pytest.fixture(scope="module")
def in_fp32():
    model = CausalLM()
    train(model, epochs=10)
    return model.losses


@pytest.mark.parametrize("name", PLUGINS)
def test_a_hugging_face_llama_trains_unchanged(name, in_fp32):
    model = CausalLM()
    train(model, PLUGINS[name](), epochs=10)
    assert in_fp32[-1] < 0.75 * in_fp32[0]
    assert model.losses[-1] == pytest.approx(in_fp32[-1], rel=CLOSE[name])
    assert model.losses != in_fp32, "the plugin did nothing"


@pytest.mark.parametrize("name", PLUGINS)
def test_a_resume_is_bitwise(name, tmp_path):
    straight, plugin = CausalLM(), PLUGINS[name]()
    expected = tensors(train(straight, plugin, folder=tmp_path), straight)
    resumed, again = CausalLM(), PLUGINS[name]()
    found = tensors(train(resumed, again, ckpt_path=tmp_path / "step=3.ckpt"), resumed)
    assert resumed.losses == straight.losses[3:]
    assert not differing(found, expected)
    assert again.state_dict() == plugin.state_dict()


@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "bf16_mixed"])
def test_a_checkpoint_opens_in_bf16_mixed_and_the_other_way_round(name, tmp_path):
    for writer, reader in ((name, "bf16_mixed"), ("bf16_mixed", name)):
        wrote, folder = CausalLM(), tmp_path / writer
        train(wrote, PLUGINS[writer](), epochs=1, folder=folder)
        checkpoint = torch.load(folder / "step=3.ckpt", weights_only=True)
        assert {type(value) for value in checkpoint["state_dict"].values()} == {torch.Tensor}
        assert list(checkpoint["state_dict"]) == list(CausalLM().state_dict())
        read = CausalLM()
        train(read, PLUGINS[reader](), ckpt_path=folder / "step=3.ckpt")
        assert len(read.losses) == 3
        assert read.losses[-1] < wrote.losses[0]


@pytest.mark.parametrize("name", ["bf16_mixed", "fp16_mixed", "fp8_tensorwise"])
def test_fp32_weights_go_on_from_the_masters_of_a_bf16_run(name, tmp_path):
    wrote, read = CausalLM(), CausalLM()
    train(wrote, PLUGINS["bf16_true_masters"](), epochs=1, folder=tmp_path)
    states = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    trainer = train(read, PLUGINS[name](), epochs=1, ckpt_path=tmp_path / "step=3.ckpt")  # no step is left to make
    for index, parameter in enumerate(read.parameters()):
        assert torch.equal(parameter, states[index]["master"])
    assert not any("master" in state for state in trainer.optimizers[0].state.values())


# A foreign module that shards itself, saved to one file; one that knows nothing of it, saved to a folder.
SHARDED = {
    "itself": (ShardedCausalLM, lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)),
    "by FSDP2Strategy": (CausalLM, FSDP2Strategy),
}


def under_fsdp2(rank: int, folder: str, alone: dict[str, list[float]]) -> None:
    for name in alone:
        for who, (model, strategy) in SHARDED.items():
            files = Path(folder) / name / who
            straight, plugin = model(), PLUGINS[name]()
            options = {"devices": 2, "data": rows(rank, 2)}
            trainer = train(straight, plugin, strategy=strategy(), folder=files, **options)
            resumed, again = model(), PLUGINS[name]()
            resumed_trainer = train(resumed, again, strategy=strategy(), ckpt_path=files / "step=3.ckpt", **options)
            different = differing(tensors(resumed_trainer, resumed), tensors(trainer, straight))
            assert not different, (name, who, different)
            assert resumed.losses == straight.losses[3:], (name, who)
            assert again.state_dict() == plugin.state_dict(), (name, who)
            mean = torch.tensor(straight.losses)
            torch.distributed.all_reduce(mean)
            torch.testing.assert_close(mean / 2, torch.tensor(alone[name]), rtol=0.02, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
def test_under_fsdp2_it_trains_as_alone_and_resumes_bitwise(fp8, tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    alone = {}
    for name in (name for name in PLUGINS if ("fp8" in name) is fp8):
        model = CausalLM()
        train(model, PLUGINS[name]())
        alone[name] = model.losses
    two_processes.run(under_fsdp2, str(tmp_path), alone)
