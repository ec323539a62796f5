"""A folder of others names files in itself alone, and nothing is written through a link in it."""

import json
import os
import re
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from checkpoints.saved import checkpoint
from checkpoints.shards import write_shards
from commands.exported import SIZES, tokenizer
from models.decoders import build

from lightning_tricks import Llama
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import check_links, inside, is_inside
from lightning_tricks._host.writable import check_file
from lightning_tricks.checkpoints import check_checkpoint, load_weights, open_checkpoint
from lightning_tricks.checkpoints.check_checkpoint import verify_checkpoint
from lightning_tricks.checkpoints.find_checkpoint import newest_whole
from lightning_tricks.checkpoints.record import RECORD_FILE, Record, read_record, to_json
from lightning_tricks.checkpoints.write_file import is_locked, write_file
from lightning_tricks.commands.export.folder_files import Entry, write_weights
from lightning_tricks.data.tokenizer import open_tokenizer
from lightning_tricks.logs.ledger_file import LedgerFile
from lightning_tricks.models import Decoder, hf_config, to_hf
from lightning_tricks.monitors.goodput_monitor import History

OUTSIDE = "outside of it"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the stranger's, with files that no command may read or change."""
    (tmp_path / "outside").mkdir()
    return tmp_path / "outside"


def hugging_face(folder: Path, file_bytes: int = 10**9) -> Path:
    folder.mkdir(parents=True)
    config = Llama(**SIZES)
    state = to_hf(build(config).state_dict(), config)
    entries = [Entry(name, tuple(each.shape), each.dtype, lambda each=each: each) for name, each in state.items()]
    write_weights(entries, folder, file_bytes)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **hf_config(config)}))
    (folder / "tokenizer.json").write_text(tokenizer()["json"])
    return folder


def move_out(file: Path, outside: Path) -> None:
    """Put a link in the place of a file, which is then outside."""
    shutil.move(file, outside / file.name)
    file.symlink_to(outside / file.name)


def as_cache(folder: Path) -> Path:
    """The same folder as Hugging Face's cache has it: links to blobs with other names."""
    root = folder.parent / "models--me--tiny"
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(root / "blobs" / f"hash{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash{number}")
    return snapshot


def test_names_and_links_are_followed_to_where_they_lead(tmp_path, outside):
    folder = tmp_path / "mine"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text("")
    (folder / "within").symlink_to("file")
    (folder / "out").symlink_to(outside / "secret")
    (folder / "twice").symlink_to("out")
    (folder / "up").symlink_to("..")
    (tmp_path / "mine2").mkdir()  # begins with the folder's name
    assert all(is_inside(folder, folder / name) for name in ("file", "within", "sub/new", "not/there", "sub/../file"))
    for name in ("out", "twice", "up/outside/secret", "../mine2/x", "../outside", "/etc/passwd"):
        assert not is_inside(folder, folder / name), name
    (tmp_path / "link").symlink_to(folder)
    assert is_inside(tmp_path / "link", tmp_path / "link" / "within")
    with pytest.raises(UsageError, match=re.escape(f"out is {outside / 'secret'}, which is outside of it")):
        inside(folder, folder / "out")


def test_hugging_faces_cache_is_one_place(tmp_path, outside):
    snapshot = as_cache(hugging_face(tmp_path / "hf"))
    load_weights(Decoder(Llama(**SIZES)), snapshot)
    assert open_tokenizer(str(snapshot))[1] == str(snapshot)
    assert is_inside(snapshot / "sub", snapshot.parent.parent / "blobs" / "hash0")
    assert not is_inside(snapshot, tmp_path / "models--other" / "blobs" / "hash0")
    shutil.move(snapshot.parent.parent / "blobs", outside / "blobs")
    (snapshot.parent.parent / "blobs").symlink_to(outside / "blobs")  # a cache whose blobs are elsewhere
    with pytest.raises(UsageError, match=OUTSIDE):
        load_weights(Decoder(Llama(**SIZES)), snapshot)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_a_hugging_face_folder_is_no_link_out_of_it(tmp_path, outside, name):
    folder = hugging_face(tmp_path / "hf")
    move_out(folder / name, outside)
    with pytest.raises(UsageError, match=OUTSIDE):
        door.run(["import", str(folder), "--output", str(tmp_path / "mine.yaml")])
    assert not (tmp_path / "mine.yaml").exists()
    with pytest.raises(UsageError, match=OUTSIDE):
        load_weights(Decoder(Llama(**SIZES)), folder)
    if name == "tokenizer.json":
        with pytest.raises(UsageError, match=OUTSIDE):
            open_tokenizer(str(folder))


@pytest.mark.parametrize("how", ["link", "dots", "absolute", "index"])
def test_an_index_names_files_of_its_folder_alone(tmp_path, outside, how):
    folder = hugging_face(tmp_path / "hf", file_bytes=20_000)
    index = folder / "model.safetensors.index.json"
    first = sorted(folder.glob("*.safetensors"))[0]
    move_out(index if how == "index" else first, outside)
    names = {"dots": f"../outside/{first.name}", "absolute": str(outside / first.name)}
    if how in names:
        index.write_text(index.read_text().replace(first.name, names[how]))
        first.unlink()
    with pytest.raises(UsageError, match=OUTSIDE):
        load_weights(Decoder(Llama(**SIZES)), folder)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp", RECORD_FILE])
def test_a_checkpoint_of_shards_is_its_own_files(tmp_path, outside, name):
    folder = write_shards(tmp_path / "shards", {"state_dict": {"weight": torch.ones(4)}})
    if name == RECORD_FILE:
        (folder / name).write_bytes(to_json(Record()))
    move_out(folder / name, outside)
    for read in (check_checkpoint, open_checkpoint):
        with pytest.raises(UsageError, match="outside of"):
            read(folder)
    if name in ("meta.pt", ".metadata"):  # which are read as well where the caller has checked the bytes
        with pytest.raises(UsageError, match="outside of"):
            open_checkpoint(folder, verify=False)


@pytest.mark.parametrize("name", ["../outside/secret", "/dev/zero"])
def test_a_record_names_files_of_its_folder_alone(tmp_path, outside, name):
    folder = write_shards(tmp_path / "shards", {"state_dict": {"weight": torch.ones(4)}})
    (folder / RECORD_FILE).write_bytes(to_json(Record(checksums={name: 1})))
    with pytest.raises(UsageError, match="outside of it"):
        open_checkpoint(folder)


def test_a_link_of_last_leads_to_a_checkpoint_beside_it(tmp_path, outside):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    write_file(checkpoint(), outside / "step=2.ckpt")
    (folder / "last.ckpt").symlink_to(outside / "step=2.ckpt")
    found = newest_whole([folder], lambda path: None)
    assert found.chosen is None
    assert found.passed_over[0].endswith("which is outside of its folder")
    write_file(checkpoint(), folder / "step=1.ckpt")
    assert newest_whole([folder], lambda path: None).chosen.place == folder / "step=1.ckpt"


@pytest.mark.parametrize("place", ["step=2.ckpt", "step=2.ckpt/record.json", "step=2.ckpt/part", ".step=2.ckpt.saving"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, place):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    if place.count("/"):
        write_shards(folder / "step=2.ckpt", {"state_dict": {"weight": torch.ones(4)}})
    if place.endswith("part"):
        (folder / "step=2.ckpt" / RECORD_FILE).write_bytes(to_json(Record(checksums={"part": 1})))
    os.mkfifo(folder / place)
    assert not is_locked(folder / place)  # which opens it
    write_file(checkpoint(), folder / "step=1.ckpt")
    assert newest_whole([folder], verify_checkpoint).chosen is not None


@pytest.mark.parametrize("content", [{"more": 1}, {"number": "9"}, {"checksums": []}])
def test_a_record_of_other_values_is_one_line(tmp_path, content):
    folder = write_shards(tmp_path / "shards", {"state_dict": {"weight": torch.ones(4)}})
    record = json.loads(to_json(Record()))["record"] | content
    text = json.dumps({"record": record, "crc32": zlib.crc32(json.dumps(record).encode())})
    (folder / RECORD_FILE).write_text(text)
    with pytest.raises(UsageError, match=r"damaged: the record of .*shards has"):
        read_record(folder)


def test_a_run_does_not_go_on_in_a_folder_with_links_out_of_it(tmp_path, outside):
    folder = tmp_path / "version_0"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").symlink_to("step=1.ckpt")
    check_links(folder)
    (folder / "metrics.csv").symlink_to(outside / "bashrc")
    with pytest.raises(UsageError, match=OUTSIDE):
        check_links(folder)


def test_a_run_writes_its_own_files_through_no_link(tmp_path, outside):
    for name in (".goodput.json.part", "ledger.jsonl"):
        (tmp_path / name).symlink_to(outside / name)
    history = History("a run")
    history.place_by(tmp_path / "checkpoints" / "step=1.ckpt")
    history.write((0.0, 1.0))
    with pytest.raises(UsageError, match="this is a link to"):
        LedgerFile(tmp_path / "ledger.jsonl")
    assert (tmp_path / "goodput.json").is_file()
    assert not list(outside.iterdir())


def test_no_command_writes_through_a_link(tmp_path, outside, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = hugging_face(tmp_path / "hf")
    for name in ("mine.yaml", "tiny.yaml", "report.html", "out"):
        Path(name).symlink_to(outside / name)
    with pytest.raises(UsageError, match=r"report.html: this is a link to"):
        check_file("doctor: html", "report.html")
    check_file("doctor: json", "/dev/stdout")
    with pytest.raises(UsageError, match=r"mine.yaml: this is a link to"):
        door.run(["import", str(folder), "--output", "mine.yaml"])
    with pytest.raises(UsageError, match=r"tiny.yaml exists"):
        door.run(["cp", "tiny", "."])
    with pytest.raises(UsageError, match="output=out exists"):
        door.run(["export", "--ckpt_path", "none.ckpt", "--output", "out"])
    assert not list(outside.iterdir())
    assert os.path.islink("out")
