"""Generation: the cache changes nothing, greedy tokens are transformers', draws follow the stated distribution."""

import pytest
import torch
import transformers
from models.decoders import CONFIGS, build
from models.decoders import tokens as some

from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import hf_config, hf_family, to_hf
from lightning_tricks.models.attention import KVCache
from lightning_tricks.models.generate import Sampling, generate

PROMPT = some(3, 5)


def tokens(*args, **kwargs):
    return torch.stack(list(generate(*args, **kwargs)), dim=1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_with_a_cache_are_those_of_the_whole_row(config):
    decoder, row = build(config), some(2, 24, seed=3)
    cache = KVCache(config.n_layers, 24)
    pieces = [decoder(part, cache=cache) for part in row.split([7, 1, 1, 5, 10], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), decoder(row), rtol=1e-4, atol=1e-5)
    assert cache.length == 24


@pytest.mark.parametrize("name", ["llama-all", "gpt2"])
def test_greedy_tokens_are_those_of_transformers(name):
    ours = build(CONFIGS[name]).eval()
    theirs = transformers.AutoConfig.for_model(hf_family(ours.config).model_type, **hf_config(ours.config))
    model = transformers.AutoModelForCausalLM.from_config(theirs).eval()
    model.load_state_dict(to_hf(ours.state_dict(), ours.config), strict=False)
    expected = model.generate(PROMPT, max_new_tokens=19, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(tokens(ours, PROMPT, 19), expected[:, 5:])


def test_the_filters_by_hand():
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()

    def chances(**options):
        return Sampling(**options).probabilities(logits)[0].tolist()

    assert chances() == pytest.approx([0.4, 0.1, 0.3, 0.2])
    assert chances(temperature=0.5) == pytest.approx([16 / 30, 1 / 30, 9 / 30, 4 / 30])
    assert chances(top_k=2) == pytest.approx([4 / 7, 0, 3 / 7, 0])
    assert chances(top_p=0.7) == pytest.approx([4 / 7, 0, 3 / 7, 0])  # 0.4 + 0.3 reach it
    assert chances(top_p=0.75) == pytest.approx([4 / 9, 0, 3 / 9, 2 / 9])
    assert chances(top_p=0.01) == pytest.approx([1, 0, 0, 0])  # one token always stays
    assert chances(top_k=3, top_p=0.7) == pytest.approx([4 / 7, 0, 3 / 7, 0])  # of the three's own distribution
    assert chances(top_k=9) == chances()


def test_draws_have_the_stated_distribution():
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log().expand(100_000, 4)
    drawn = Sampling(top_k=3).choose(logits, torch.Generator().manual_seed(0)).bincount(minlength=4) / 100_000
    assert drawn.tolist() == pytest.approx([4 / 9, 0, 3 / 9, 2 / 9], abs=0.01)


def test_a_seed_repeats_and_leaves_torchs_random_state_alone():
    decoder, before = build(CONFIGS["llama"]), torch.get_rng_state()
    options = {"sampling": Sampling(), "generator": None}
    runs = []
    for seed in (1, 1, 2):
        options["generator"] = torch.Generator().manual_seed(seed)
        runs.append(tokens(decoder, PROMPT, 19, **options))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(before, torch.get_rng_state())


def test_compiled_blocks_compile_nothing_for_it():
    decoder = build(CONFIGS["llama"])
    expected = tokens(decoder, PROMPT, 4)

    def backend(graph, inputs):
        raise AssertionError("compiled")

    for block in decoder.blocks:
        block.compile(backend=backend)
    assert torch.equal(tokens(decoder, PROMPT, 4), expected)


def next_of(prompt, count):
    return lambda: next(generate(build(CONFIGS["llama"]), prompt, count))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Sampling(temperature=-1.0), "temperature=-1.0: give 0"),
        (lambda: Sampling(temperature=float("nan")), "temperature=nan"),
        (lambda: Sampling(top_k=0), "top_k=0: give a whole number"),
        (lambda: Sampling(top_p=0.0), "top_p=0.0: give a number above 0"),
        (lambda: Sampling(top_p=1.5), "top_p=1.5"),
        (next_of(PROMPT, 20), r"max_new_tokens=20 after a prompt of 5 .* max_seq_len=24: give at most 19"),
        (next_of(PROMPT[:, :0], 1), "the prompt holds no token"),
    ],
)
def test_a_bad_option_and_a_row_that_does_not_fit_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()
