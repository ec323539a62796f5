"""A folder of shards as torch writes it, without a strategy of ours, and one of a Trainer's own file."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

REST = {"lr_schedulers": [], "global_step": 3, "loops": {}, "pytorch-lightning_version": "2.6.0"}


def named(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[place] for place in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[place]: value for place, value in state["state"].items()}, "param_groups": groups}


def write_shards(folder: Path, shards: dict[str, Any], rest: Any = REST) -> Path:
    dcp.save(shards, checkpoint_id=folder, no_dist=True)
    torch.save(rest, folder / "meta.pt")
    return folder


def of_file(file: Path, folder: Path, module: nn.Module) -> Path:
    """The folder that would have been saved in the place of a plain Trainer's file."""
    rest = torch.load(file, weights_only=False)
    names = [name for name, _ in module.named_parameters()]
    states = {f"optimizer_{i}": named(state, names) for i, state in enumerate(rest.pop("optimizer_states"))}
    averages = {"averages": rest.pop("averages")} if "averages" in rest else {}
    return write_shards(folder, {"state_dict": rest.pop("state_dict"), **states, **averages}, rest)
