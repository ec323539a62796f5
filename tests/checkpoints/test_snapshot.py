"""A snapshot is bitwise the state at its moment, whatever training does afterwards, and no larger than the state."""

import copy
import io
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from checkpoints.saved import assert_same, checkpoint_of, flat, overwrite, trained
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from lightning_tricks.checkpoints.snapshot import HostBuffers, kinds_of, snapshot


def size_of_file(tree) -> int:
    torch.save(tree, file := io.BytesIO())
    return file.getbuffer().nbytes


@pytest.mark.parametrize("recreated", [False, True], ids=["in place", "recreated"])
def test_nothing_that_training_does_reaches_it(recreated):
    module, optimizer, scaler = trained()
    tree = checkpoint_of(module, optimizer, scaler)
    expected, taken = copy.deepcopy(tree), snapshot(tree)
    if recreated:
        optimizer.state.clear()
        module(torch.arange(4)).sum().backward()
        optimizer.step()
    overwrite(module, optimizer)
    scaler.update(3.0)
    torch.rand(5)
    tree["random"]["torch"].zero_()
    tree["loops"]["batches"].append(3)
    tree["optimizer_states"][0]["param_groups"][0]["lr"] = 9.0
    assert_same(taken, expected)
    steps = [path for path in flat(expected) if path[-1] == "step" and "state" in path]
    assert steps  # AdamW's counts are tensors on the CPU, which the overwriting reaches
    assert all(flat(taken)[path] == 2 for path in steps)


def test_the_next_snapshot_takes_the_memory_of_the_last_and_frees_what_it_does_not_need():
    buffers, tree = HostBuffers(), checkpoint_of(*trained())
    first = {path: t.data_ptr() for path, t in flat(snapshot(tree, buffers)).items() if isinstance(t, torch.Tensor)}
    sizes = sorted(size for (size, _), _ in buffers._used)
    snapshot(tree, buffers)
    assert sorted(size for (size, _), _ in buffers._used) == sizes
    later = {path: t.data_ptr() for path, t in flat(snapshot(tree, buffers)).items() if isinstance(t, torch.Tensor)}
    assert set(later.values()) == set(first.values())
    snapshot({"small": torch.zeros(3)}, buffers)
    snapshot({}, buffers)
    assert (buffers._used, list(buffers._free.values())) == ([], [[buffers._free[12, False][0]]])


def test_memory_that_was_reserved_is_that_of_the_first_snapshot():
    base, buffers = torch.arange(1000.0), HostBuffers()
    tree = {"base": base, "view": base[10:20], "other": torch.ones(7, dtype=torch.bfloat16), "none": torch.empty(0)}
    kinds = kinds_of(tree.values())
    assert kinds == [(4000, False), (14, False)]
    two = TwoTensor(torch.ones(3), torch.ones(3))  # a wrapper: it has no memory of its own
    assert kinds_of([two, torch.nn.Parameter(two), torch.eye(3).to_sparse()]) == [(12, False), (12, False)]
    buffers.reserve(kinds)
    addresses = {buffer.data_ptr() for _, buffer in buffers._used}
    taken = snapshot(tree, buffers)
    assert {taken["base"].data_ptr(), taken["other"].data_ptr()} == addresses
    assert_same(taken, tree)


def test_memory_that_is_shared_in_the_state_is_shared_in_the_copy():
    tree = checkpoint_of(*trained())
    taken = snapshot(tree)
    one, other = taken["state_dict"]["0.weight"], taken["state_dict"]["2.weight"]
    assert one.data_ptr() == other.data_ptr()
    assert size_of_file(taken) == size_of_file(tree)
    base = torch.arange(1000.0)
    views = {"base": base, "row": base[10:20], "turned": base.view(10, 100).T, "same": base}
    taken = snapshot(views)
    assert_same(taken, views)
    assert taken["turned"].stride() == views["turned"].stride()
    assert taken["same"] is taken["base"]
    assert size_of_file(taken) == size_of_file(views)
    taken["base"][15] = -1
    assert taken["row"][5] == taken["turned"][15, 0] == -1


def test_kinds_of_tensors_stay_what_they_are():
    tree = {
        "parameter": torch.nn.Parameter(torch.ones(2)), "frozen": torch.nn.Parameter(torch.ones(2), False),
        "empty": torch.empty(0, 3), "scalar": torch.tensor(3), "bf16": torch.ones(2, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64) * 1j, "bool": torch.tensor([True]),
        "expanded": torch.ones(1).expand(5), "channels": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
    }  # fmt: skip
    tree["conjugate"] = tree["complex"].conj()
    taken = snapshot(tree)
    assert_same(taken, tree)
    for name, value in tree.items():
        assert type(taken[name]) is type(value)
        assert taken[name].requires_grad == value.requires_grad
        assert taken[name].stride() == value.stride()
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(snapshot([sparse])[0].to_dense(), torch.eye(3))


def test_the_containers_are_copied_too():
    tree = OrderedDict(a={"b": [1, (torch.ones(1), "x")]}, none=None)
    tree._metadata = {"version": 1}  # as a module's state dict has it
    taken = snapshot(tree)
    assert type(taken) is OrderedDict
    assert taken._metadata == {"version": 1}
    assert taken["a"]["b"][1] == (torch.ones(1), "x")
    assert taken["a"] is not tree["a"]
    module = torch.nn.Linear(2, 2)  # an object with tensors
    taken, expected = snapshot({"module": module})["module"], module.weight.detach().clone()
    torch.nn.init.zeros_(module.weight)
    assert torch.equal(taken.weight, expected)


def test_a_save_in_validation_leaves_tensors_that_training_can_use():
    with torch.inference_mode():
        taken = snapshot({"weight": torch.ones(2)})
    assert not taken["weight"].is_inference()


def test_a_dtensor_stays_one_with_a_copy_of_its_part():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole = torch.arange(12.0).view(4, 3)
    tensor = distribute_tensor(whole.clone(), init_device_mesh("cpu", (1,)), [Shard(0)])
    parameter = torch.nn.Parameter(tensor)
    assert kinds_of([tensor, parameter]) == [(48, False)]
    taken = snapshot({"tensor": tensor, "parameter": parameter, "again": tensor.detach()})
    tensor.to_local().zero_()
    for copied in taken.values():
        assert isinstance(copied, DTensor)
        assert copied.placements == tensor.placements
        assert copied.device_mesh is tensor.device_mesh
        assert torch.equal(copied.to_local(), whole)
    assert taken["tensor"].to_local().data_ptr() == taken["again"].to_local().data_ptr()
