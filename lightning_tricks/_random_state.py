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
from numpy.random.mtrand import get_bit_generator, set_bit_generator


def random_state() -> dict[str, Any]:
    """The state of this process's global generators; of CUDA's, that of the current device."""
    version, words, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": plain(np.random.get_state(legacy=False)),
        "python": {"version": version, "words": torch.tensor(words), "gauss": next_gauss},
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put the state of `random_state` back, of CUDA only where there is a CUDA device."""
    torch.set_rng_state(state["torch"].cpu())
    numpy, python = state["numpy"], state["python"]
    kind = getattr(np.random, numpy["bit_generator"])
    if not isinstance(get_bit_generator(), kind):
        set_bit_generator(kind())
    np.random.set_state(with_arrays(numpy))
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def gather_random_states() -> list[dict[str, Any]]:
    """The states of all processes, by rank; every rank must call."""
    return gather(random_state())


def gather(own: Any) -> list[Any]:
    """What each process gives, by rank; every rank must call."""
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones


def set_random_state_of(rank: int, states: Sequence[dict[str, Any]]) -> None:
    """Put back the state of one rank, or give a rank that the saved run did not have a stream of its own.

    Such a stream is a function of rank 0's saved state and of the rank: the same at each resume from a checkpoint.
    """
    if rank < len(states):
        set_random_state(states[rank])
        return
    set_random_state(states[0])
    seed = (zlib.crc32(states[0]["torch"].cpu().numpy().tobytes()) + rank) % 2**32
    random.seed(seed)
    seed_numpy(seed)
    torch.manual_seed(seed)


def seed_numpy(seed: int) -> None:
    """`np.random.seed`, also where another generator than NumPy's default one is set, which refuses it."""
    generator = get_bit_generator()
    if isinstance(generator, np.random.MT19937):
        np.random.seed(seed % 2**32)
    else:
        generator.state = type(generator)(seed).state


def plain(state: Any) -> Any:
    """NumPy's arrays as tensors, its numbers as Python's: 32-bit words keep their size, 64-bit ones become a list."""
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.view(np.int32).copy()) if state.dtype == np.uint32 else state.tolist()
    return state.item() if isinstance(state, np.generic) else state


def with_arrays(state: Any) -> Any:
    """The state that `plain` was given, as NumPy takes it."""
    if isinstance(state, dict):
        return {name: with_arrays(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.cpu().numpy().view(np.uint32).copy()
    return np.array(state, dtype=np.uint64) if isinstance(state, list) else state
