"""The benchmarks compare like with like: every contender ends with the same weights after the same batches."""

import copy
import itertools

import pytest
import torch

from benchmarks.contenders import CONTENDERS
from benchmarks.feed import Meter, in_memory, load, own_loader, write_tokens
from benchmarks.gpu_peers import PEERS
from benchmarks.gpu_sizes import SIZES, toy, variants
from benchmarks.hand_written import HandWritten
from lightning_tricks.models import GPT2, Decoder, Llama
from lightning_tricks.optim.bf16_step import BF16Step

# In fp32, since under bf16 the order of a sum would show; a short warmup, so that the weights move; a clip that cuts.
TOY = (
    *toy(SIZES["memory_7b"]).options,
    *("--trainer.plugins", "null", "--trainer.gradient_clip_val", "0.5"),
    *("--model.init_args.schedule.init_args.warmup_steps", "2"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds the recipe anew, as `load` does: its command line is read once, and its objects are made at each call."""
    folder = tmp_path_factory.mktemp("toy")
    cli = load("llama7b_1gpu", write_tokens(folder, 256, 20_000), folder, TOY)

    def build():
        torch.manual_seed(0)
        own = copy.copy(cli)
        own.instantiate_classes()
        return own

    return build


@pytest.fixture(scope="module")
def trained(built):
    weights, marks = {}, {}
    for name, contender in CONTENDERS.items():
        cli = built()
        seen = marks[name] = []
        decoder = contender(cli, in_memory(cli, 8), 8, seen.append)
        weights[name] = torch.cat([p.detach().flatten() for p in decoder.parameters()])
    start = CONTENDERS["bare"](built(), [], 0, lambda index: None)
    return weights, marks, torch.cat([p.detach().flatten() for p in start.parameters()])


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_trains_the_same_weights(trained, name):
    weights, _, start = trained
    way = (weights["bare"] - start).norm()
    assert way > 1e-2
    assert (weights[name] - weights["bare"]).norm() < 1e-4 * way


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_is_marked_once_a_batch_and_at_the_end(trained, name):
    assert trained[1][name] == list(range(9))


def test_a_meter_ends_where_it_is_told_and_takes_no_batch_more():
    batches, marks = itertools.count(), []
    assert list(Meter(batches, 3, marks.append)) == [0, 1, 2]
    assert marks == [0, 1, 2, 3]
    assert next(batches) == 4


def test_batches_in_memory_are_those_of_the_loader_repeated(built):
    loaded = itertools.islice(own_loader(built()), 3)
    kept = list(itertools.islice(in_memory(built(), 2), 3))
    first, second, third = loaded
    assert torch.equal(kept[0]["input_ids"], first["input_ids"])
    assert torch.equal(kept[1]["labels"], second["labels"])
    assert torch.equal(kept[2]["labels"], first["labels"])
    assert not torch.equal(third["labels"], first["labels"])


def test_a_mark_ends_the_batches():
    assert list(Meter(itertools.count(), 10**9, lambda index: index == 3)) == [0, 1, 2]


SHAPES = {
    "llama": Llama(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=16),
    "gpt2": GPT2(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=16, bias=False),
    "gpt2_with_biases": GPT2(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=16),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_model_by_hand_is_the_same_function_with_as_many_parameters(shape):
    torch.manual_seed(0)
    ours, hand = Decoder(shape), HandWritten(shape, 16)
    for parameter in ours.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter, std=0.3)
    hand.load(ours.state_dict())
    ids, labels = torch.randint(0, 64, (2, 3, 16))
    losses = [ours(ids, labels=labels) / labels.numel(), hand(ids, labels)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    norms = []
    for model, loss in zip((ours, hand), losses, strict=True):
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=0)
    assert sum(p.numel() for p in hand.parameters()) == sum(p.numel() for p in ours.parameters())
    hand.runs_again = True
    assert torch.equal(hand(ids, labels), losses[1])


@pytest.mark.parametrize("name", ["hand_whole", "hand_blocks"])
def test_a_model_by_hand_trains_as_ours_does(built, name):
    marks = []
    cli = built()
    model = PEERS[name](cli, in_memory(cli, 8), 8, marks.append)
    assert marks == list(range(9))
    expected = HandWritten(cli.model.config, 32)
    cli = built()
    expected.load(CONTENDERS["bare"](cli, in_memory(cli, 8), 8, lambda index: None).state_dict())
    start = CONTENDERS["bare"](built(), [], 0, lambda index: None)
    first = HandWritten(cli.model.config, 32)
    first.load(start.state_dict())
    trained, wanted, began = (
        torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, expected, first)
    )
    assert (trained - wanted).norm() < 1e-4 * (wanted - began).norm()


def test_the_bare_loop_steps_weights_in_bf16_as_the_plugin_does(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(BF16Step, "__init__", note(BF16Step.__init__, steps))
    size = toy(SIZES["llama7b"])
    for name in ("bare", "ours"):
        cli = load(size.recipe, write_tokens(tmp_path, 256, 20_000), tmp_path, size.options)
        model = CONTENDERS[name](cli, in_memory(cli, 4), 4, lambda index: None)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert len(steps) == 2
    assert steps[0] == steps[1] == ("stochastic_rounding", "fp32")


def note(act, calls):
    def noting(self, optimizer, update="stochastic_rounding", optimizer_state="fp32", *rest):
        calls.append((update, optimizer_state))
        act(self, optimizer, update, optimizer_state, *rest)

    return noting


@pytest.mark.parametrize("size", ["gpt2_124m", "llama7b"])
def test_fp8_has_the_base_of_the_size(size):
    base = SIZES[size].base
    assert f'"base": "{base}"' in variants(base, False, False)["fp8_tensorwise"][1]
    assert ("BF16True" in str(SIZES[size].options)) == (base == "bf16-true")
