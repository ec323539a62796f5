"""The parts of RunLedger: exact sums over bits, how they are split and joined, and where its file is written."""

import itertools
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import processes
from harness.models import rows
from ledger_run import Rows, failing, fit, net
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from lightning_tricks import RunLedger
from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.ledger_file import read_ledger
from lightning_tricks.monitors import _bit_sums as sums_module
from lightning_tricks.monitors._bit_sums import (
    BASE,
    LEAST,
    MODULUS,
    PER_TENSOR,
    WeightSum,
    batch_sums,
    leading_dims,
    odd_factors,
    optimizer_sum,
    other_random_sum,
    salt,
    step_sum,
    torch_random_sum,
)
from lightning_tricks.monitors.run_ledger import RankValues, step_line

CPU = torch.device("cpu")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def number(total):
    return total.item() % MODULUS


def batch_sum(batch, rank=0, world=1):
    """The share of a rank that takes one micro-batch."""
    sums, rows = batch_sums(batch)
    return step_sum([sum(number(total) for total in sums)], rows, rank, world)


def test_the_factors_are_splitmix64():
    """The first outputs of Vigna's generator for the seed 0, with the last bit set."""
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    factors = odd_factors(torch.arange(1, 4), 0)
    assert [number(factor) for factor in factors] == [value | 1 for value in known]
    assert (odd_factors(torch.arange(1000), salt("a")) % 2 == 1).all()


def test_the_sum_of_a_batch_by_hand():
    x = torch.tensor([[3, 0], [0, 5]])
    first, second = (number(factor) for factor in odd_factors(torch.arange(2), salt("tensor 0")))
    assert batch_sum(x) == (3 * first + 5 * second * BASE) % MODULUS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_single_bit_changes_the_sums(dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    module = nn.Module()
    module.weight = nn.Parameter(x, requires_grad=False)
    weights = WeightSum(module, 1, 0)
    sums = lambda: (batch_sum({"x": x}), number(weights.of_part(0, CPU)))  # noqa: E731
    before, changed = sums(), []
    bits = x.view(torch.uint8).view(-1)
    for place, bit in itertools.product(range(len(bits)), range(1 if dtype == torch.bool else 8)):
        bits[place] ^= 1 << bit
        changed.append(sums())
        bits[place] ^= 1 << bit
    assert all(batch != before[0] and part != before[1] for batch, part in changed)
    assert len({batch for batch, _ in changed}) == len(changed) or dtype == torch.int64
    assert sums() == before


def test_two_signs_that_change_are_seen():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = rows(2, 70).to(dtype)
        other = x.clone()
        other[:, 3] *= -1
        assert batch_sum(other) != batch_sum(x)
        module = nn.Linear(70, 2, bias=False)
        module.weight = nn.Parameter(x)
        before = number(WeightSum(module, 1, 0).of_part(0, CPU))
        module.weight = nn.Parameter(other)
        assert number(WeightSum(module, 1, 0).of_part(0, CPU)) != before


def test_any_two_rows_or_values_that_change_places_change_the_sum():
    x = torch.randint(100, (64, 6), generator=torch.Generator().manual_seed(0))
    seen = {batch_sum(x)}
    swaps = list(itertools.combinations(range(64), 2))
    for one, other in swaps:
        order = list(range(64))
        order[one], order[other] = other, one
        seen.add(batch_sum(x[order]))
    assert len(seen) == len(swaps) + 1
    assert batch_sum(x.T.contiguous().T) == batch_sum(x)
    assert batch_sum(x[:, [1, 0, 2, 3, 4, 5]]) != batch_sum(x)
    assert batch_sum({"a": x, "b": x + 1}) != batch_sum({"a": x + 1, "b": x})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128, torch.int64], ids=str)
@pytest.mark.parametrize("row", [(5,), (), (2, 3)], ids=str)
def test_a_batch_has_one_sum_however_it_is_split(dtype, row):
    x = torch.randn(12, *row).to(dtype)
    for world, micro_batches in ((1, 1), (1, 3), (2, 2), (3, 4), (4, 3), (12, 1)):
        rows = 12 // world // micro_batches
        parts = x.reshape(micro_batches, world, rows, *row)
        total = 0
        for rank in range(world):
            sums = [number(batch_sums(parts[m, rank])[0][0]) for m in range(micro_batches)]
            total += step_sum(sums, rows, rank, world)
        assert total % MODULUS == batch_sum(x)


def test_a_large_tensor_is_summed_in_slices(monkeypatch):
    for shape in ((7, 3, 50), (300,), (1, 900), (40, 20)):
        x = rows(*shape)
        for tensor in (x, x.double(), x.to(torch.bfloat16), x.transpose(0, -1)):
            whole = batch_sum([x, tensor])
            with monkeypatch.context() as patch:
                patch.setattr(sums_module, "SLICE", 64)
                assert batch_sum([x, tensor]) == whole


def test_a_row_is_as_many_of_the_last_dimensions_as_make_64_values():
    shapes = {(): 0, (100,): 1, (10, 100): 1, (100, 3): 1, (8, 16, 3, 3): 1, (8, 100, 64): 2, (8, 2, 40, 3, 30): 3}
    assert {shape: leading_dims(torch.Size(shape)) for shape in shapes} == shapes


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(1000, 200)
        self.linear = nn.Linear(130, 301)  # rows of an odd number of words
        self.experts = nn.Parameter(torch.randn(4, 6, 64))
        self.filters = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.small = nn.Parameter(torch.randn(7, 6).bfloat16())


def test_the_parts_hold_every_row_once():
    module = Mixed()
    elements = sum(parameter.numel() for parameter in module.parameters())
    for parts in (1, 2, 3, 100):
        weights = WeightSum(module, parts, 0)
        assert weights.parts == min(parts, (elements + len(list(module.parameters())) * PER_TENSOR) // LEAST)
        total = sum(number(weights.of_part(part, CPU)) for part in range(weights.parts)) % MODULUS
        assert total == number(WeightSum(module, 1, 0).of_part(0, CPU)) == number(weights.of_all(CPU))
        assert number(WeightSum(module, parts, 1).of_all(CPU)) == 0  # rank 0 counts what each rank holds
    before = [number(weights.of_part(part, CPU)) for part in range(weights.parts)]
    with torch.no_grad():
        module.embedding.weight.view(torch.int32)[999, 199] ^= 1
    after = [number(weights.of_part(part, CPU)) for part in range(weights.parts)]
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


def test_parameters_without_values_yet_are_named():
    weights = WeightSum(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), 1, 0)
    assert (weights.left_out, weights.recorded) == (["1.weight", "1.bias"], True)
    assert not WeightSum(nn.Dropout(), 1, 0).recorded


def sharded_sums(rank):
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("copies", Replicate())):
        module = Mixed()
        for path in ("embedding.weight", "linear.weight", "experts"):
            owner, _, last = path.rpartition(".")
            owner = module.get_submodule(owner)
            weight = distribute_tensor(getattr(owner, last).detach(), mesh, [placement])
            setattr(owner, last, nn.Parameter(weight))
        results[name] = module
    results["fsdp2"] = Mixed()
    del results["fsdp2"].scale, results["fsdp2"].filters  # fully_shard takes neither
    fully_shard(results["fsdp2"])
    assert isinstance(results["fsdp2"].small, DTensor)
    sums = {
        name: [number(WeightSum(module, parts, rank).of_all(CPU)) for parts in (1, 3)]
        for name, module in results.items()
    }
    parts = WeightSum(results["rows"], 3, rank)
    sums["parts"] = [number(parts.of_part(part, CPU)) for part in range(parts.parts)]
    row = nn.Module()  # of which rank 1 has nothing
    row.weight = nn.Parameter(distribute_tensor(torch.ones(1, 70), mesh, [Shard(0)]))
    sums["one row"] = [number(WeightSum(row, 1, rank).of_part(0, CPU)), number(WeightSum(row, 1, rank).of_all(CPU))]
    return sums


@pytest.mark.long
def test_shards_of_two_processes_add_up_to_the_sum_of_one():
    one, other = processes.run(sharded_sums)
    expected = number(WeightSum(Mixed(), 1, 0).of_all(CPU))
    plain = Mixed()
    del plain.scale, plain.filters
    for name in ("rows", "columns", "copies", "fsdp2"):
        want = number(WeightSum(plain, 1, 0).of_all(CPU)) if name == "fsdp2" else expected
        assert [(a + b) % MODULUS for a, b in zip(one[name], other[name], strict=True)] == [want, want], name
    assert one["parts"] != other["parts"]
    row = nn.Module()
    row.weight = nn.Parameter(torch.ones(1, 70))
    assert (one["one row"], other["one row"]) == ([number(WeightSum(row, 1, 0).of_all(CPU))] * 2, [0, 0])


def test_every_part_of_the_optimizers_state_is_in_its_sum():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    adam = torch.optim.AdamW(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    module(torch.ones(4, 3)).sum().backward()
    adam.step()
    total = lambda: number(optimizer_sum([adam], module, scaler, CPU))  # noqa: E731
    seen, moments = [total()], adam.state[module[0].weight]
    assert total() == seen[0]
    for change in (
        lambda: moments["exp_avg"].view(torch.int32)[1, 2].bitwise_xor_(1),
        lambda: moments["step"].add_(1),
        lambda: adam.param_groups[0].update(lr=0.2),
        lambda: module[1].running_mean.add_(1),
        lambda: scaler._scale.mul_(2),
        lambda: adam.state.pop(module[0].bias),
    ):
        change()
        seen.append(total())
    assert len(set(seen)) == 7
    assert number(optimizer_sum([adam], module, None, CPU)) != seen[-1]


@pytest.fixture(params=[np.random.MT19937, np.random.PCG64])
def generator(request):
    """NumPy's own kind of global generator, and another one."""
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(request.param(1))
    yield
    np.random.set_bit_generator(own)


def test_a_random_state_is_told_from_those_around_it(generator):
    seen = set()
    for draw in (torch.rand, np.random.rand, random.random, torch.rand, np.random.rand):
        seen.add((torch_random_sum(CPU), other_random_sum()))
        draw() if draw is random.random else draw(1)
    assert len(seen) == 5
    assert (torch_random_sum(CPU), other_random_sum()) == (torch_random_sum(CPU), other_random_sum())


# --------------------------------------------------------------------------------------------------------------- lines


def test_a_line_of_ranks_that_differ_or_are_silent():
    one, other = RankValues(MODULUS - 1, 1, 2, None, 7), RankValues(3, 1, 9, None, 7)
    line = step_line(4, [(0, 7), (9, 9)], float("nan"), [one, other], [0, 1])
    assert line["batch"] == "0000000000000002"
    assert (line["torch_random"], line["other_random"]) == ("00000001", ["00000002", "00000009"])
    assert (line["loss"], line["weights"]) == ("nan", "0000000000000007")
    assert step_line(4, None, 1.5, [one, other], [0])["batch"] == f"{MODULUS - 1:016x}"  # rank 1 sees the same data
    silent = step_line(4, None, None, [one, None], [0, 1])
    assert (silent["samples"], silent["batch"], silent["weights"]) == (None, None, ["0000000000000007", None])


def test_files_that_are_no_ledger_are_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine\n")
    with pytest.raises(UsageError, match=r"path=.*notes.txt: the file is no ledger: name another one"):
        fit(tmp_path / "run", ledger=RunLedger(str(tmp_path / "notes.txt")))
    assert (tmp_path / "notes.txt").read_text() == "mine\n"
    with pytest.raises(UsageError, match=r"notes.txt/ledger.jsonl: cannot be written \("):
        fit(tmp_path / "run", ledger=RunLedger(str(tmp_path / "notes.txt" / "ledger.jsonl")))


class Quantized(torch.Tensor):
    """Stands for a tensor of a library, whose bits lie where only that library knows."""


def partly(dropout):
    module = net(dropout)
    tables = [nn.Parameter(torch.ones(3).as_subclass(Quantized), requires_grad=False) for _ in range(4)]
    module.tables = nn.ParameterList(tables)
    return module


def test_weights_that_cannot_be_read_are_left_out_with_one_warning(tmp_path, recwarn):
    fit(tmp_path / "whole", max_steps=1)
    fit(tmp_path / "partly", module=partly, max_steps=1)
    said = [str(warning.message) for warning in recwarn if "RunLedger" in str(warning.message)]
    names = "tables.0, tables.1, tables.2, ..."
    assert said == [f"RunLedger: 4 parameters cannot be read and are not in the ledger: {names}"]
    assert read_ledger(tmp_path / "partly").steps == read_ledger(tmp_path / "whole").steps


def test_a_strategy_that_holds_no_parameter_whole_has_a_ledger_without_weights(tmp_path, recwarn):
    strategy = type("FSDPStrategy", (pl.strategies.SingleDeviceStrategy,), {"__module__": "lightning.pytorch"})
    fit(tmp_path, strategy=strategy(CPU), saver=pl.Callback(), max_steps=2)
    ledger = read_ledger(tmp_path)
    assert [ledger.starts[0][name] for name in ("weights", "parts", "elements", "sharded")] == [None] * 4
    assert [step["weights"] for step in ledger.steps.values()] == [None, None]
    assert all(step["loss"] for step in ledger.steps.values())
    line = "RunLedger: FSDPStrategy holds no parameter whole: the ledger has no weights"
    assert [str(warning.message) for warning in recwarn if "RunLedger" in str(warning.message)] == [line]


def test_two_that_write_one_file_are_refused_and_two_files_have_the_same_lines(tmp_path):
    path, folder = str(tmp_path / "ledger.jsonl"), f"{tmp_path}/other/.."
    (tmp_path / "other").mkdir()
    for one, other in ((RunLedger(path), RunLedger(f"{folder}/ledger.jsonl")), (RunLedger(), RunLedger())):
        with pytest.raises(
            UsageError, match=r"^RunLedger.path=.*: the Trainer has two that write one file: remove one"
        ):
            fit(tmp_path / "saved", one, ledger=other, max_steps=1)
    assert not (tmp_path / "ledger.jsonl").exists()
    fit(tmp_path / "both", RunLedger(path, 1), ledger=RunLedger(str(tmp_path / "b.jsonl"), 1), max_steps=2)
    assert (tmp_path / "b.jsonl").read_text() == (tmp_path / "ledger.jsonl").read_text()


def test_the_file_lies_in_the_folder_of_the_first_logger(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = pl.loggers.CSVLogger(tmp_path / "runs", name="small")
    fit(tmp_path / "a", ledger=RunLedger(), logger=logger, max_steps=2)
    assert list(read_ledger(logger.log_dir).steps) == [0, 1]
    fit(tmp_path / "a", ledger=RunLedger(), max_steps=2, default_root_dir=tmp_path / "b")
    assert list(read_ledger(tmp_path / "b").steps) == [0, 1]
    fit(tmp_path / "a", ledger=RunLedger("dev.jsonl"), fast_dev_run=True)
    assert not (tmp_path / "dev.jsonl").exists()


def test_the_last_steps_before_a_failure_are_written(tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        fit(tmp_path, failing(3), log_every_n_steps=50, enable_checkpointing=True, max_steps=5)
    assert list(read_ledger(tmp_path).steps) == [0, 1, 2]
    fit(tmp_path, data=Rows(2), accumulate_grad_batches=2)  # with the first fit's windows forgotten
    assert not [line for line in read_ledger(tmp_path).repeated if line[0]["samples"] != line[1]["samples"]]
