"""Compiling pays where a run is long enough for it: the choice by given seconds, and what measuring leaves behind."""

import pytest
import torch
from torch import nn

from lightning_tricks._errors import UsageError
from lightning_tricks.models import Decoder, Llama, compile_choice
from lightning_tricks.models.compile_choice import choose

CONFIG = Llama(vocab_size=32, d_model=16, n_layers=2, n_heads=2, max_seq_len=8)


class Block(nn.Module):
    """Eager, a call takes 20 ms; compiled, as many as it is told."""

    def __init__(self, compiled=10.0, error=None):
        super().__init__()
        self.times, self.error, self.tried = {False: 0.020, True: compiled / 1000}, error, False

    def compile(self):
        self._compiled_call_impl, self.tried = object(), True
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Seconds as the block says them, in place of a clock; compiling takes 5."""
    monkeypatch.setattr(compile_choice, "available_cores", lambda: 1)

    def seconds_of(act, cores):
        block = act()
        return 9.0, block.times[block._compiled_call_impl is not None and not eagerly]

    eagerly = []

    def eager(seconds):
        eagerly.append(True)
        try:
            return seconds()
        finally:
            eagerly.clear()

    monkeypatch.setattr(compile_choice, "_eagerly", eager)
    monkeypatch.setattr(compile_choice, "seconds_of", seconds_of)
    now = iter(range(0, 1000, 5))
    monkeypatch.setattr(compile_choice.time, "perf_counter", lambda: next(now))


def chosen(block, calls):
    found = choose(block, lambda: block, calls)
    assert block._compiled_call_impl is None  # left as it was
    return found


def test_a_run_that_is_too_short_compiles_nothing():
    block = Block()
    found = chosen(block, 3999)  # 79.98 s, of which compiling could save a quarter
    assert (found.compiled, block.tried) == (False, False)
    assert found.reason == "the rest of the run has 80 s in its blocks, too few to earn it"


@pytest.mark.parametrize(
    ("milliseconds", "calls", "compiled", "reason"),
    [
        (18.0, 4000, True, "a block takes 18.0 ms compiled and 20.0 ms eager: 8 s in the rest of the run, after 5 s"),
        (19.5, 4000, False, "a block takes 19.5 ms compiled and 20.0 ms eager: 2 s in the rest of the run, after 5 s"),
        (21.0, 10**6, False, "a block takes 21.0 ms compiled and 20.0 ms eager: -1000 s in the rest of the run"),
        (19.0, None, True, "a block takes 19.0 ms compiled and 20.0 ms eager, after 5 s of compiling"),
    ],
)
def test_a_long_run_compiles_where_that_earns_its_seconds(milliseconds, calls, compiled, reason):
    found = chosen(Block(milliseconds), calls)
    assert found.compiled is compiled
    assert found.reason.startswith(reason)


def test_a_compiler_that_fails_leaves_the_blocks_eager_and_says_why():
    found = chosen(Block(error=RuntimeError("no C++ compiler\nmore")), 10**6)
    assert (found.compiled, found.reason) == (False, "torch.compile fails here (no C++ compiler)")


def test_measuring_a_decoder_leaves_gradients_and_random_numbers_alone(monkeypatch):
    monkeypatch.undo()
    decoder, state = Decoder(CONFIG), torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        found = decoder.compile_choice(2, 8, calls=1)
    assert not found.compiled
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in decoder.parameters())


def test_another_word_is_refused():
    from lightning_tricks import LanguageModel

    with pytest.raises(UsageError, match="compile_blocks='yes': give true, false or auto"):
        LanguageModel(CONFIG, compile_blocks="yes")
