"""A checkpoint with every part that Lightning saves, and a comparison of two checkpoints to the bit."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_tricks.checkpoints.record import KEY

_FORK = multiprocessing.get_context("fork")


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A module with tied weights after some steps of AdamW, and a scaler that has grown."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False))
    module[2].weight = module[0].weight
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(module(torch.arange(4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return module, optimizer, scaler


def checkpoint_of(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, step: int = 2) -> dict[str, Any]:
    """The dict that Lightning would save, without a copy of any tensor."""
    return {
        "pytorch-lightning_version": "2.6.0",
        "global_step": step,
        "epoch": 0,
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "MixedPrecision": scaler.state_dict(),
        "random": {"torch": torch.get_rng_state()},
        "loops": {"batches": [1, 2]},
        KEY: {"record": {"step": step, "number": step}},
    }


def checkpoint(step: int = 2, size: int = 100) -> dict[str, Any]:
    """A small checkpoint whose tensor says its step."""
    return {
        "pytorch-lightning_version": "2.6.0",
        "global_step": step,
        "state_dict": {"weight": torch.full((size,), float(step))},
        "optimizer_states": [],
        "lr_schedulers": [],
    }


def flat(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """The leaves of nested dicts, lists and tuples, by their keys."""
    if not isinstance(tree, dict | list | tuple):
        return {path: tree}
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {key: leaf for name, child in entries for key, leaf in flat(child, (*path, name)).items()}


def assert_same(found: Any, expected: Any) -> None:
    """Two checkpoints are equal to the bit, types of tensors too."""
    ours, theirs = flat(found), flat(expected)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[path].dtype == value.dtype, path
            assert torch.equal(ours[path], value), path
        else:
            assert ours[path] == value, path


def overwrite(module, optimizer) -> None:
    """Another value in place of every one, in every tensor that a checkpoint holds."""
    with torch.no_grad():
        for tensor in [*module.state_dict().values(), *flat(optimizer.state_dict()).values()]:
            if isinstance(tensor, torch.Tensor):
                tensor.add_(1)


def in_child(act: Callable[[], None]) -> int:
    """Run a function in a forked process; its exit code, or minus the signal that killed it."""
    child = _FORK.Process(target=act)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode
