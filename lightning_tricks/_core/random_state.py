"""The random state of every process of a run: of torch, CUDA, NumPy and Python, as a checkpoint holds it.

The values are tensors and numbers, so that the checkpoint opens with `weights_only=True`.
"""

import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.random.mtrand import get_bit_generator, set_bit_generator

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_IN_CHECKPOINT = "random_states"  # of each rank


def random_state() -> dict[str, Any]:
    """The state of this process's global generators; of CUDA's, that of the current device."""
    version, words, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": _plain(np.random.get_state(legacy=False)),
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
    np.random.set_state(_with_arrays(numpy))
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def save_random_states(checkpoint: dict[str, Any], own: dict[str, Any] | None = None) -> None:
    """Add the states of all processes to a checkpoint, unless another callback has; every rank must call.

    Args:
        checkpoint: that is being made.
        own: state of this process to save in place of the present one, and of one that another callback has added.
    """
    if own is not None or _IN_CHECKPOINT not in checkpoint:
        checkpoint[_IN_CHECKPOINT] = gather(own or random_state())


def saved_random_states(checkpoint: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What `save_random_states` has added, by rank; None in a checkpoint without."""
    return checkpoint.get(_IN_CHECKPOINT)


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


def seed_process(seed: int, generators: Iterable[Generator] = ()) -> None:
    """Seed the global generators of this process, and some others. CUDA's are left alone: they are the model's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    seed_numpy(seed)
    for generator in generators:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        else:
            bits = cast(Any, generator)._bit_generator  # of both classes of NumPy; its public name is of one only
            bits.state = type(bits)(seed).state


@contextmanager
def own_randomness(seed: int, generators: Iterable[Generator] = ()) -> Iterator[None]:
    """Seed the global generators inside the `with`, and put their states back afterwards.

    NumPy's generator is exchanged for another one: to read its state would take more time than all the rest.
    """
    torch_state, python_state, numpy_generator = torch.get_rng_state(), random.getstate(), get_bit_generator()
    set_bit_generator(np.random.MT19937())
    try:
        seed_process(seed, generators)
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        set_bit_generator(numpy_generator)


def generator_state(generator: Generator) -> dict[str, Any]:
    """The state of a generator object, in plain types under the name of its library."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state()}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"python": [version, list(words), gauss]}
    if isinstance(generator, np.random.Generator):
        return {"numpy": _plain(generator.bit_generator.state)}
    return {"numpy": _plain(generator.get_state(legacy=False))}


def set_generator_state(generator: Generator, state: dict[str, Any]) -> None:
    """Put the state of `generator_state` back."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state["torch"].cpu())
    elif isinstance(generator, random.Random):
        version, words, gauss = state["python"]
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state["numpy"])
    else:
        generator.set_state(_with_arrays(state["numpy"]))


def _plain(state: Any) -> Any:
    """NumPy's arrays as tensors, its numbers as Python's: 32-bit words keep their size, 64-bit ones become a list."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.view(np.int32).copy()) if state.dtype == np.uint32 else state.tolist()
    return state.item() if isinstance(state, np.generic) else state


def _with_arrays(state: Any) -> Any:
    """The state that `_plain` was given, as NumPy takes it."""
    if isinstance(state, dict):
        return {name: _with_arrays(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.cpu().numpy().view(np.uint32).copy()
    return np.array(state, dtype=np.uint64) if isinstance(state, list) else state
