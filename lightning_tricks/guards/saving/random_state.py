"""The random state of every process of a run: of torch, CUDA, NumPy and Python, as a checkpoint holds it.

The values are tensors and numbers, so that the checkpoint opens with `weights_only=True`.
"""

import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def random_state() -> dict[str, Any]:
    """The state of this process's global generators; of CUDA's, that of the current device."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    _, words, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {"keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)), "position": int(position)},
        "python": {"words": torch.tensor(words), "gauss": next_gauss},
    }
    state["numpy"] |= {"gauss": float(gauss) if has_gauss else None}
    assert name == "MT19937"  # the only one that NumPy's global generator has
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put the state of `random_state` back."""
    torch.set_rng_state(state["torch"].cpu())
    gauss = state["numpy"]["gauss"]
    keys = state["numpy"]["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, state["numpy"]["position"], int(gauss is not None), gauss or 0.0))
    random.setstate((3, tuple(state["python"]["words"].tolist()), state["python"]["gauss"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def gather_random_states() -> list[dict[str, Any]]:
    """The states of all processes, by rank; every rank must call."""
    state = random_state()
    if not (dist.is_available() and dist.is_initialized()):
        return [state]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def set_random_state_of(rank: int, states: Sequence[dict[str, Any]]) -> None:
    """Put back the state of one rank, or give a rank that the saved run did not have a stream of its own.

    Such a stream is a function of rank 0's saved state and of the rank: the same at each resume from a checkpoint.
    """
    if rank < len(states):
        set_random_state(states[rank])
        return
    set_random_state(states[0])
    seed = (zlib.crc32(states[0]["torch"].numpy().tobytes()) + rank) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
