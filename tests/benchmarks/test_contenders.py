"""The benchmarks compare like with like: every contender ends with the same weights after the same batches."""

import copy
import itertools

import pytest
import torch

from benchmarks.contenders import CONTENDERS
from benchmarks.feed import Meter, in_memory, load, own_loader, write_tokens
from benchmarks.gpu_sizes import SIZES, toy

# In fp32, since under bf16 the order of a sum would show; a short warmup, so that the weights move; a clip that cuts.
TOY = (
    *toy(SIZES["llama7b_1gpu"]).options,
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
