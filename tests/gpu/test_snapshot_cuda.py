"""Snapshots of a GPU's tensors: right though the GPU goes on at once, in page-locked memory that is used again."""

import pytest
import torch

from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.snapshot import HostBuffers, snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def state() -> dict[str, torch.Tensor]:
    large = torch.arange(2**24, dtype=torch.float32, device="cuda")
    return {"large": large, "row": large[5:9], "small": torch.tensor([3.0], device="cuda"), "step": torch.tensor(2.0)}


@pytest.mark.parametrize("buffers", [None, HostBuffers()], ids=["pageable", "pinned"])
def test_what_the_gpu_does_next_is_not_in_it(buffers):
    for number in range(3):
        tree = state()
        tree["large"].add_(number)
        taken = snapshot(tree, buffers)
        for tensor in tree.values():
            tensor.zero_()
        assert torch.equal(taken["large"], torch.arange(2**24, dtype=torch.float32) + number)
        assert taken["row"].tolist() == [5.0 + number, 6.0 + number, 7.0 + number, 8.0 + number]
        assert taken["row"].data_ptr() == taken["large"].data_ptr() + 20
        assert taken["small"].item() == 3
        assert taken["step"].item() == 2
        assert all(tensor.device.type == "cpu" for tensor in taken.values())


def test_the_memory_is_page_locked_and_used_again():
    buffers = HostBuffers()
    first = snapshot(state(), buffers)
    addresses = {name: tensor.data_ptr() for name, tensor in first.items() if name != "step"}
    assert first["large"].is_pinned()
    del first
    second = snapshot(state(), buffers)
    assert {name: second[name].data_ptr() for name in addresses} == addresses
    snapshot({"small": state()["small"]}, buffers)
    snapshot({}, buffers)  # and what a snapshot leaves unused is freed
    assert not buffers._free
    assert sum(size for (size, _), _ in buffers._used) < 100


def test_no_copy_waits_by_itself_and_other_streams_are_not_waited_for():
    buffers, other = HostBuffers(), torch.cuda.Stream()
    snapshot(state(), buffers)
    tree = state()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(2**31)  # about a second
        done = torch.cuda.Event()
        done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        snapshot(tree, buffers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not done.query()
    torch.cuda.synchronize()


def test_a_save_in_the_background_is_the_state_at_its_moment(tmp_path):
    io = AtomicCheckpointIO(asynchronous=True)
    for step in range(2):
        tree = state()
        expected = tree["large"].cpu()
        checkpoint = {
            "state_dict": tree,
            "pytorch-lightning_version": "2.6.0",
            "lr_schedulers": [],
            "global_step": step,
        }
        io.save_checkpoint(checkpoint, tmp_path / "at.ckpt")
        tree["large"].zero_()
        io.wait()
        assert torch.equal(io.load_checkpoint(tmp_path / "at.ckpt")["state_dict"]["large"], expected)
