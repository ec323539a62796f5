"""What version 0.1.0 wrote, with the recipe that wrote it (of_0_1_0/): it opens, verifies and goes on as it did."""

import csv
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from checkpoints.saved import assert_same
from harness.processes import run
from harness.token_files import write_token_files

from lightning_tricks.__main__ import run as command
from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints import read_folder, verify_checkpoint
from lightning_tricks.checkpoints.load_weights import read_weights
from lightning_tricks.checkpoints.record import read_record

OLD = Path(__file__).parent / "of_0_1_0"
# what the run of that version logged for the steps behind its checkpoint, with the EMA's loss in validation
LOSSES = [4.169966, 4.152130, 4.164765, 4.170823]
NORMS = [0.956482, 1.173926, 1.208151, 1.089995]
VALIDATION_OF_THE_EMA = 4.162029


def unpack(kind: str, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    if kind == "file":
        return Path(shutil.copy(OLD / "file.ckpt", path))
    with tarfile.open(OLD / "folder.tar.xz") as archive:
        archive.extractall(path.parent, filter="data")
    return (path.parent / "folder.ckpt").rename(path)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_every_byte_is_verified_and_a_changed_one_is_found(tmp_path, kind):
    path = unpack(kind, tmp_path / "old.ckpt")
    record = read_record(verify_checkpoint(path, resumes=True))
    assert (record.step, record.version, record.finite) == (4, 2, True)
    large = path if path.is_file() else path / "__0_0.distcp"
    content = bytearray(large.read_bytes())
    content[len(content) // 2] ^= 1
    large.write_bytes(content)
    with pytest.raises(UsageError, match=r"damaged: .* has other bytes"):
        verify_checkpoint(path)


def test_both_kinds_hold_the_same_tensors_and_give_their_average(tmp_path):
    path = unpack("file", tmp_path / "file.ckpt")
    file, folder = torch.load(path, weights_only=True), read_folder(unpack("folder", tmp_path / "folder.ckpt"))
    for part in ("state_dict", "optimizer_states", "averages"):
        assert_same(folder[part], file[part])
    average = file["averages"]["ema"]["weights"]["mean"]
    assert_same(read_weights(path, average="ema")["state_dict"], average)


def go_on(_: int, folder: Path, kind: str, options: list[str]) -> None:
    os.chdir(folder)
    write_token_files(folder)
    unpack(kind, folder / "saved" / "step=4.ckpt")
    command(["fit", "--config", str(OLD / "recipe.yaml"), "--resume", "auto", *options])


CASES = {
    "file": ("file", []),
    "folder": ("folder", []),
    "folder in shards": ("folder", ["--trainer.strategy", "FSDP2Strategy"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_from_it_with_the_figures_of_the_run_that_wrote_it(tmp_path, case):
    run(go_on, tmp_path, *CASES[case], world=1)
    with (tmp_path / "runs/old/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}
    assert logged["train/loss"] == pytest.approx(LOSSES, abs=2e-4)
    assert logged["train/grad_norm"] == pytest.approx(NORMS, abs=2e-3)
    assert logged["val/loss"] == pytest.approx([VALIDATION_OF_THE_EMA], abs=2e-4)
    assert read_record(tmp_path / "saved/last.ckpt").step == 8
