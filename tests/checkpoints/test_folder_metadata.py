"""Nothing that is pickled in a folder of shards is run, and all that torch's own folders hold is let in."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from shards import write_shards
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import check_checkpoint, open_checkpoint
from lightning_tricks.checkpoints.folder_metadata import read_metadata

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
WEIGHTS = {str(dtype): torch.zeros(3, dtype=dtype) for dtype in DTYPES}


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def folder(tmp_path):
    settings = {"state": {}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": ["a"]}]}
    return write_shards(tmp_path / "at.ckpt", {"state_dict": WEIGHTS, "optimizer_0": settings})


def refused(folder: Path, match: str, weights_only: bool | None = None) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        open_checkpoint(folder, weights_only=weights_only)
    assert "\n" not in str(caught.value)


def test_it_reads_what_torch_reads(folder):
    expected, found = FileSystemReader(folder).read_metadata(), read_metadata(folder)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.planner_data == expected.planner_data
    assert found.storage_data == expected.storage_data
    assert found.storage_meta.checkpoint_id == str(folder)
    assert {entry.properties.dtype for entry in list(found.state_dict_metadata.values())[: len(DTYPES)]} == set(DTYPES)


def test_a_disk_that_cannot_read_it_is_no_damage(folder):
    (folder / ".metadata").unlink()
    with pytest.raises(FileNotFoundError):
        read_metadata(folder)


def test_members_of_enums_may_be_pickled_as_python_3_11_0_does_it(folder, monkeypatch):
    metadata = FileSystemReader(folder).read_metadata()
    kind = type(next(iter(metadata.state_dict_metadata.values())).properties.__getstate__()[3])
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert read_metadata(folder).state_dict_metadata == metadata.state_dict_metadata


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_a_program_in_the_metadata_is_refused_and_not_run(folder, weights_only, tmp_path):
    marker = tmp_path / "marker"
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data["state_dict.x"] = Evil(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(folder, r"\.metadata asks for \w+\.system, which no description of tensors needs", weights_only)
    with pytest.raises(UsageError, match="asks for"):
        check_checkpoint(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "asked",
    [
        b"ctorch.distributed.checkpoint.metadata\nos.system\n.",  # of the module's own import
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93.",
        b"cbuiltins\neval\n.",
        # attributes that are no members: of a class that describes tensors, and of an enum of such
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntR.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nV__class__\ntR.",
        b"ctorch\nload\n.",
        b"ctorch\nload_inline\n.",
    ],
)
def test_names_behind_the_allowed_ones_are_refused(folder, asked):
    (folder / ".metadata").write_bytes(asked)
    refused(folder, "asks for")


@pytest.mark.parametrize("weights_only", [None, True])
def test_a_program_in_the_place_of_a_setting_is_refused_and_not_run(weights_only, tmp_path):
    marker = tmp_path / "marker"
    shards = {"state_dict": WEIGHTS, "optimizer_0": {"param_groups": [{"lr": Evil(marker), "params": ["a"]}]}}
    folder = write_shards(tmp_path / "at.ckpt", shards)
    refused(folder, r"holds \w+\.system, which weights_only=True does not allow", weights_only)
    assert not marker.exists()
    open_checkpoint(folder, weights_only=False)  # who asks for it gets it
    assert marker.exists()


def test_a_program_in_meta_pt_is_refused_and_not_run(tmp_path):
    marker = tmp_path / "marker"
    folder = write_shards(tmp_path / "at.ckpt", {"state_dict": WEIGHTS}, {"lr_schedulers": [], "x": Evil(marker)})
    refused(folder, "which weights_only=True does not allow")
    assert not marker.exists()


def rewrite(folder: Path, **changes) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    for name, change in changes.items():
        change(getattr(metadata, name))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_name_outside_of_the_folder_is_refused(folder):
    def outside(storage_data):
        next(iter(storage_data.values())).relative_path = "../elsewhere.distcp"

    rewrite(folder, storage_data=outside)
    refused(folder, r"names \.\./elsewhere\.distcp, which is outside of the folder")


def test_a_tensor_that_would_be_left_out_is_said(folder):
    rewrite(folder, planner_data=lambda paths: paths.pop("state_dict.torch.int64"))
    refused(folder, r"incomplete: .* says nothing of 'state_dict\.torch\.int64', so it would be left out")


def test_metadata_of_another_shape_is_one_line(folder):
    for content in (None, 3, SimpleNamespace, {"storage_data": {}}, StorageMeta(), MetadataIndex("a")):
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        refused(folder, "incomplete: .* cannot be read|asks for")
