"""The plan of tensor parallelism: where it comes from, what it divides, and one line for each that cannot be."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import local
from lightning_tricks.commands.plan.fake_cluster import fake_world
from lightning_tricks.models import GPT2, Decoder, Llama
from lightning_tricks.models.linear_cross_entropy import linear_cross_entropy
from lightning_tricks.parallel import tensor
from lightning_tricks.parallel.dims import Mesh, ParallelDims
from lightning_tricks.parallel.parallelize import ParallelOptions, check_module, parallelize
from lightning_tricks.parallel.tensor import plan_of

DIMS = ParallelDims(tensor=2).of_world(4)


class Planned(nn.Module):
    """Two layers, with a plan of the test's."""

    def __init__(self, plan: dict[str, str] | None = None, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, width), nn.Linear(width, 4), nn.LayerNorm(4)
        if plan is not None:
            self.parallel_plan = lambda: plan


def divided(module: nn.Module, dims: ParallelDims = DIMS, rank: int = 0, **options: Any) -> nn.Module:
    with fake_world(rank, dims.world):
        parallelize(module, Mesh.of(dims, "cpu"), ParallelOptions(**options))
    return module


def test_a_plan_has_the_place_of_its_part():
    module = nn.ModuleDict({"net": Planned({"up": "colwise", "down": "rowwise"})})
    assert plan_of(module) == {"net.up": "colwise", "net.down": "rowwise"}
    assert plan_of(nn.Linear(1, 1)) == {}


@pytest.mark.parametrize("family", [Llama, GPT2])
def test_ranks_have_a_part_of_each_matrix_of_the_decoder_and_norms_are_whole(family):
    with torch.device("meta"):
        decoder = Decoder(family(vocab_size=64, d_model=32, n_layers=1, n_heads=4, max_seq_len=16))
    parts = {name: tuple(local(parameter).shape) for name, parameter in divided(decoder).named_parameters()}
    assert parts["blocks.0.attn.q.weight"] == (8, 32)  # of 32 rows, over two tensor ranks and two shards
    assert parts["blocks.0.attn.o.weight"] == (16, 16)  # of its columns, and of its rows
    assert parts["blocks.0.attn_norm.weight"] == (16,)
    assert parts["embed.weight"] == parts.get("head.weight", (16, 32)) == (16, 32)
    assert ("head.weight" in parts) is (family is Llama)  # tied weights stay tied


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (lambda: Planned(), "mesh.tensor: Planned says nowhere how its layers are divided: give it a method"),
        (lambda: Planned({"upp": "colwise"}), "mesh.tensor: the plan names 'upp', and Planned has no such module"),
        (lambda: Planned({"up": "column"}), "mesh.tensor: the plan says 'column' of 'up': known are colwise, "),
        (lambda: Planned({"norm": "colwise"}), "mesh.tensor: the plan says colwise of 'norm', a LayerNorm: only"),
        (
            lambda: Planned({"up": "colwise", "down": "rowwise"}, width=7),
            "mesh.tensor=2 does not divide out_features=7 of 'up': take another size",
        ),
        (
            lambda: Decoder(Llama(vocab_size=61, d_model=16, n_layers=1, n_heads=2, max_seq_len=8)),
            "mesh.tensor=2 does not divide num_embeddings=61 of 'embed': pad the vocabulary, or take another size",
        ),
        (
            lambda: Decoder(Llama(vocab_size=64, d_model=24, n_layers=1, n_heads=3, max_seq_len=8)),
            "mesh.tensor=2 does not divide n_heads=3: take a divisor of it",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_before_any_group_is_made(module, line):
    with pytest.raises(UsageError) as refused:
        check_module(module(), DIMS)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_module_that_cannot_take_parts_of_rows_is_refused():
    with pytest.raises(UsageError, match=r"mesh\.context: Planned cannot treat a part of each row"):
        check_module(Planned(), ParallelDims(context=2).of_world(2))


def test_with_sequence_parallelism_a_parameter_that_the_plan_forgets_is_refused():
    plan = {"up": "colwise", "down": "rowwise"}
    divided(Planned(plan))  # without a word about rows there is no sequence parallelism
    with pytest.raises(UsageError, match=r"sequence_parallel: the plan does not name the module of 'norm\.weight'"):
        divided(Planned({**plan, "": "gather_sequence"}))
    divided(Planned({**plan, "": "gather_sequence"}), sequence_parallel=False)


def test_after_a_refusal_its_advice_works_in_the_same_process():
    two, llama = ParallelDims(tensor=2).of_world(2), Llama(vocab_size=64, d_model=32, n_layers=1, n_heads=4)
    with fake_world(0, 2):
        mesh = Mesh.of(two, "cpu")
        model = Decoder(llama)
        parallelize(model, mesh, ParallelOptions())
        with pytest.raises(
            UsageError, match=r"sequence_parallel: 5 tokens of a row are no multiple of mesh\.tensor=2: .*"
        ):
            model(torch.arange(10).view(2, 5))
        model = Decoder(llama)
        parallelize(model, mesh, ParallelOptions(sequence_parallel=False))
        assert model(torch.arange(40, 50).view(2, 5)).shape == (2, 5, 64)


@pytest.mark.parametrize("forgotten", ["norm", "down"])
def test_a_plan_that_is_refused_leaves_the_module_as_it_was(forgotten):
    plan = {"up": "colwise", "down": "rowwise", "": "gather_sequence"}
    module = Planned({name: word for name, word in plan.items() if name != forgotten})
    before = dict(module.named_parameters())
    with pytest.raises(UsageError, match="sequence_parallel: the plan does not name the module of"):
        divided(module, convert=lambda part: setattr(part, "up", nn.Linear(1, 1)))
    assert all(before[name] is parameter for name, parameter in module.named_parameters())


def test_a_gradient_is_compared_until_it_was_not_zero_and_ever_more_rarely(monkeypatch):
    compared = []

    def extremes(own, mesh):
        compared.append(len(own))
        return own, own

    monkeypatch.setattr(tensor, "_extremes", extremes)
    module: Any = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "late": nn.Linear(1, 1, bias=False)})
    module["never"] = nn.Linear(1, 1, bias=False)
    check = tensor.PartialGradients(module, mesh=None)
    for step in range(1, 17):
        module["used"].weight.grad = torch.ones(1, 1)
        module["late"].weight.grad = torch.full((1, 1), float(step >= 3))
        before = len(compared)
        check.refuse()
        assert (len(compared) > before) == (step in (1, 2, 4, 8, 16))
    assert compared == [3, 2, 2, 1, 1]


def test_a_parameter_of_two_layers_stays_one_or_is_refused():
    class Tied(nn.Module):
        def __init__(self, head: str) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.parallel_plan = lambda: {"embed": "embedding_rowwise", "head": head}

    tied = divided(Tied("colwise_gather_output"))
    assert tied.head.weight is tied.embed.weight
    with pytest.raises(UsageError, match=r"one parameter of (Embedding, Linear) is divided in different ways"):
        divided(Tied("rowwise"))


def test_a_head_that_is_a_shard_is_refused_in_place_of_a_loss_over_part_of_the_vocabulary():
    model = Decoder(Llama(vocab_size=64, d_model=32, n_layers=1, n_heads=4, max_seq_len=16))
    with fake_world(0, 4):
        parallelize(model, Mesh.of(ParallelDims().of_world(4), "cpu"), ParallelOptions())
        with pytest.raises(UsageError, match="the weight of an output head is a shard: use it in the forward of the"):
            linear_cross_entropy(torch.ones(1, 3, 32), model.head.weight, torch.ones(1, 3, dtype=torch.long))
