"""A folder of shards becomes what a plain Trainer's file holds: worked out by hand, and against Lightning's own."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.saved import flat
from checkpoints.shards import REST, of_file, write_shards
from harness.models import Small, batches
from harness.runs import trainer_with

from lightning_tricks import RecipeCLI
from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import AtomicCheckpointIO, open_checkpoint, size_of_folder
from lightning_tricks.optim import decay_groups
from lightning_tricks.optim.keep_settings_on_load import keep_settings_on_load

# as torch and Lightning name things: state by name, groups in the optimizer's order, which is not the module's
NAMED = {
    "state": {"b": {"step": torch.tensor(3.0), "exp_avg": torch.full((2,), 2.0)}, "a": {"exp_avg": torch.ones(2, 3)}},
    "param_groups": [
        {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": ["b"]},
        {"lr": torch.tensor(0.2), "betas": (0.9, 0.95), "fused": None, "params": ["c", "a"]},
    ],
}
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16), "c": torch.ones(1)}


def test_names_become_places_in_the_order_of_the_groups(tmp_path):
    shards = {"state_dict": WEIGHTS, "optimizer_0": NAMED, "optimizer_1": {"state": {}, "param_groups": []}}
    shards["optimizer_1"]["param_groups"] = [{"lr": 1.0, "params": ["a"]}]
    found = open_checkpoint(write_shards(tmp_path / "at.ckpt", shards), weights_only=True)
    assert found.keys() == {*REST, "state_dict", "optimizer_states"}
    assert found["global_step"] == 3
    assert found["state_dict"].keys() == WEIGHTS.keys()
    for name, value in WEIGHTS.items():
        assert torch.equal(found["state_dict"][name], value)
        assert found["state_dict"][name].dtype == value.dtype
    first, second = found["optimizer_states"]
    assert [group["params"] for group in first["param_groups"]] == [[0], [1, 2]]  # b; c, a
    assert first["param_groups"][0] == {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": [0]}
    assert first["param_groups"][1]["lr"] == 0.2
    assert first["state"].keys() == {0, 2}
    assert torch.equal(first["state"][0]["exp_avg"], torch.full((2,), 2.0))
    assert first["state"][0]["step"] == 3
    assert torch.equal(first["state"][2]["exp_avg"], torch.ones(2, 3))
    assert second == {"state": {}, "param_groups": [{"lr": 1.0, "params": [0]}]}


def test_ten_optimizers_keep_their_order_and_weights_have_the_name_that_fsdp1_gives_them_too(tmp_path):
    states = {f"optimizer_{i}": {"param_groups": [{"lr": float(i), "params": ["a"]}]} for i in range(11)}
    found = open_checkpoint(write_shards(tmp_path / "at.ckpt", {"model": WEIGHTS, **states}))
    assert [state["param_groups"][0]["lr"] for state in found["optimizer_states"]] == [float(i) for i in range(11)]
    assert found["state_dict"].keys() == WEIGHTS.keys()
    assert "model" not in found
    found = open_checkpoint(write_shards(tmp_path / "weights.ckpt", {"state_dict": WEIGHTS}, {"global_step": 3}))
    assert found.keys() == {"global_step", "state_dict"}
    with pytest.raises(UsageError, match="holds no state_dict: it is a checkpoint of another program"):
        open_checkpoint(write_shards(tmp_path / "other.ckpt", {"weights": WEIGHTS}))


@pytest.mark.parametrize("parts", [(), ("weights",), ("weights", "averages"), ("weights", "optimizers", "averages")])
def test_of_a_folder_only_the_parts_are_read_that_are_asked_for(tmp_path, parts):
    averages = {"ema": {"weights": {"mean": {"c": torch.full((1,), 3.0)}}}}
    shards = {"state_dict": WEIGHTS, "optimizer_0": NAMED, "averages": averages}
    folder = write_shards(tmp_path / "at.ckpt", shards)
    found = open_checkpoint(folder, parts=parts)
    assert ("state_dict" in found, "averages" in found) == ("weights" in parts, "averages" in parts)
    assert len(found.get("optimizer_states", [])) == ("optimizers" in parts)
    averaged = open_checkpoint(folder, average="ema")
    assert averaged["state_dict"]["c"] == 3.0
    assert not averaged.keys() & {"averages", "optimizer_states"}


def test_the_size_counts_each_tensor_once(tmp_path):
    folder = write_shards(tmp_path / "at.ckpt", {"state_dict": WEIGHTS, "optimizer_0": NAMED})
    # weights 6 x 4 + 2 x 2 + 1 x 4; state 4 + 2 x 4 + 6 x 4; a learning rate that is a tensor
    assert size_of_folder(folder) == 32 + 36 + 4


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("place", "reason"),
    [(slice(None), r"UnpicklingError: \w+ [^()]*"), (slice(-200, None), "RuntimeError: Pytorch[^()]*")],
)
def test_a_shard_with_other_bytes_in_a_folder_without_checksums_is_damaged(place, reason, weights_only, tmp_path):
    folder = write_shards(tmp_path / "at.ckpt", {"state_dict": WEIGHTS, "optimizer_0": NAMED})
    (shard,) = folder.glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[place] = bytes(len(content[place]))
    shard.write_bytes(content)
    with pytest.raises(UsageError, match=rf"^damaged: {folder} cannot be read \({reason}.*\)$"):
        open_checkpoint(folder, weights_only=weights_only)


class Line(Small):
    """Two layers under AdamW, with or without the collection's checks of names and settings."""

    def __init__(self, recipe: bool = False, weight_decay: float = 0.1) -> None:
        super().__init__(2, 3, 1, data=batches(torch.arange(8.0).view(4, 1, 2) / 8))
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(decay_groups(self, self.hparams.weight_decay), lr=0.1)
        return keep_settings_on_load(optimizer) if self.hparams.recipe else optimizer


def fit(model: Any, steps: int, path: Any = None, plugins: Any = None, **options: Any) -> Any:
    trainer = trainer_with(max_steps=steps, plugins=plugins, enable_checkpointing=False)
    trainer.fit(model, ckpt_path=path, **options)
    return trainer


def fit_with_ours(model: Any, steps: int, path: Any = None) -> Any:
    return fit(model, steps, path, [AtomicCheckpointIO()])


@pytest.fixture
def file_and_folder(tmp_path):
    model = Line()
    file = tmp_path / "file.ckpt"
    fit(model, 3).save_checkpoint(file)
    return file, of_file(file, tmp_path / "folder.ckpt", model)


def test_a_plain_trainer_opens_it_and_goes_on_to_the_bit(file_and_folder):
    ends = []
    for path in file_and_folder:
        model = Line()
        trainer = fit_with_ours(model, 5, path)
        assert trainer.global_step == 5
        ends.append({**model.state_dict(), **flat(trainer.optimizers[0].state_dict()["state"])})
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_the_recipes_checks_of_names_and_settings_are_at_work(file_and_folder, tmp_path):
    model = Line(recipe=True)
    trainer = fit_with_ours(model, 4, file_and_folder[1])
    assert [group["weight_decay"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.0]
    rest = torch.load(file_and_folder[0], weights_only=True)
    group = rest["optimizer_states"][0]["param_groups"][0]
    group["param_names"] = group["param_names"][::-1]
    torch.save(rest, tmp_path / "turned.ckpt")
    folder = of_file(tmp_path / "turned.ckpt", tmp_path / "turned", model)
    with pytest.raises(UsageError, match=r"the checkpoint's optimizer has 'net\.2\.weight'"):
        fit_with_ours(Line(recipe=True), 4, folder)


@pytest.mark.parametrize("plugins", ["[]", "[AsyncCheckpointIO]"])
def test_the_command_line_opens_folders_unless_the_recipe_brings_a_reader(plugins, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-tricks"])
    recipe = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
    cli = RecipeCLI(run=False, args=["--config", str(recipe), "--trainer.plugins", plugins])
    assert isinstance(cli.trainer.strategy.checkpoint_io, AtomicCheckpointIO) is (plugins == "[]")
