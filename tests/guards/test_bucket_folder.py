"""SafeCheckpoint in a bucket of moto's S3 server: saves, resumes on an empty host, retention, refusals, an outage."""

import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import torch
from harness.models import Small, adamw, batches, rows
from harness.runs import fit, same, trainer_with, weights_of
from harness.s3_server import fsspec, prepare
from lightning.pytorch.loggers import CSVLogger

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import InitFrom, SafeCheckpoint
from lightning_tricks.checkpoints import AtomicCheckpointIO, check_checkpoint, load_weights
from lightning_tricks.checkpoints.bucket import Bucket, mirror
from lightning_tricks.checkpoints.load_weights import stream_weights
from lightning_tricks.checkpoints.record import RECORD_FILE, Record, to_json
from lightning_tricks.cli.choose_checkpoint import choose_checkpoint
from lightning_tricks.guards.bucket_folder import BucketFolder
from lightning_tricks.guards.checkpoint_folder import Retention

ADDRESS = "s3://runs/one"
DATA = batches([rows(4, 4)] * 99)  # all the same: a loader would begin with its first one at a resume


@pytest.fixture
def server(s3_server, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return prepare(s3_server, monkeypatch, tmp_path, "runs")


class Noisy(Small):
    """With dropout, whose random numbers a resumed run must go on with."""

    def __init__(self) -> None:
        super().__init__(4, 8, 1, dropout=0.5, optimizer=adamw)


def train(steps: int, saver: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    saver = SafeCheckpoint(ADDRESS, every_n_train_steps=2) if saver is None else saver
    torch.manual_seed(0 if ckpt_path is None else 99)
    return fit(Noisy(), saver, data=DATA, max_steps=steps, ckpt_path=ckpt_path, **options)


def new_host() -> None:
    shutil.rmtree(mirror(ADDRESS).parents[2])


def names() -> list[str]:
    return sorted(path.removeprefix("runs/one/") for path in fsspec.filesystem("s3").find("runs/one"))


def newest(saver: Any = None, logger: Any = False) -> str | None:
    """What `--resume auto` takes."""
    trainer = trainer_with(SafeCheckpoint(ADDRESS) if saver is None else saver, logger=logger)
    trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    return choose_checkpoint("fit", None, trainer, "auto")


def test_a_run_goes_on_from_the_bucket_on_an_empty_host_to_the_bit(server):
    whole = train(8, SafeCheckpoint(mirror("s3://runs/other"), every_n_train_steps=2))
    train(4)
    assert names() == ["step=2.ckpt", "step=4.ckpt"]
    for address in (None, f"{ADDRESS}/step=4.ckpt", "last"):
        new_host()
        path = newest() if address is None else address
        resumed = train(8, ckpt_path=path)
        assert resumed.model.losses == whole.model.losses[4:]
        assert same(resumed.weights, whole.weights)
        fsspec.filesystem("s3").rm(["runs/one/step=6.ckpt", "runs/one/step=8.ckpt"])


def test_what_is_put_is_the_file_of_this_host_and_retention_is_that_of_the_folder(server):
    saver = SafeCheckpoint(ADDRESS, every_n_train_steps=1, keep_last=1, permanent_steps=3)
    train(7, saver)
    assert names() == ["step=3.ckpt", "step=6.ckpt", "step=7.ckpt"]
    assert sorted(path.name for path in mirror(ADDRESS).glob("step*")) == ["step=7.ckpt"]  # permanent ones stay there
    assert fsspec.filesystem("s3").cat_file("runs/one/step=7.ckpt") == (mirror(ADDRESS) / "step=7.ckpt").read_bytes()
    assert saver.best_model_path == str(mirror(ADDRESS) / "step=7.ckpt")
    assert torch.load(saver.last_model_path, weights_only=True)["global_step"] == 7


class Scored(Noisy):
    """The best score is that of step 2."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", float(abs(self.trainer.global_step - 1)))
        return super().training_step(batch, batch_idx)


def test_the_best_one_is_known_on_an_empty_host_by_its_address(server):
    options = {"every_n_train_steps": 1, "keep_last": 1, "monitor": "score"}
    fit(Scored(), SafeCheckpoint(ADDRESS, **options), max_steps=4)
    assert names() == ["step=2.ckpt", "step=4.ckpt"]
    new_host()
    saver = SafeCheckpoint(ADDRESS, **options)
    model = Scored()
    run = fit(model, saver, max_steps=6, ckpt_path=newest(saver))
    assert names() == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]  # the one that it was resumed from stays
    assert saver.best_model_path == f"{ADDRESS}/step=2.ckpt"
    run.trainer.validate(model, torch.ones(2, 4), ckpt_path="best", verbose=False)


def test_no_checkpoint_of_the_bucket_is_replaced_and_none_of_another_run_is_touched(server, recwarn):
    train(4)
    first = {name: fsspec.filesystem("s3").cat_file(f"runs/one/{name}") for name in names()}
    new_host()
    train(4)  # another run
    assert names() == ["step=2-v1.ckpt", "step=2.ckpt", "step=4-v1.ckpt", "step=4.ckpt"]
    assert any(
        "s3://runs/one holds checkpoints that this run did not write (2, the newest is step=4.ckpt)" in str(w.message)
        for w in recwarn
    )
    assert {name: fsspec.filesystem("s3").cat_file(f"runs/one/{name}") for name in first} == first
    assert newest().endswith("step=4-v1.ckpt") or Path(newest()).resolve().name == "step=4-v1.ckpt"
    # going back to an earlier step: the later one is kept until it is one too many
    train(4, ckpt_path=f"{ADDRESS}/step=2-v1.ckpt")
    assert names() == ["step=2-v1.ckpt", "step=2.ckpt", "step=4-v1.ckpt", "step=4-v2.ckpt", "step=4.ckpt"]


def test_the_newest_of_host_and_bucket_counts_and_what_is_damaged_in_either_is_passed_over(server, capsys):
    train(4)
    assert newest() == str(mirror(ADDRESS) / "last.ckpt")  # nothing is fetched
    damaged = bytearray(fsspec.filesystem("s3").cat_file("runs/one/step=4.ckpt"))
    damaged[len(damaged) // 2] ^= 1
    fsspec.filesystem("s3").pipe_file("runs/one/step=4.ckpt", bytes(damaged))
    new_host()
    assert newest() == str(mirror(ADDRESS) / "step=2.ckpt")
    assert not (mirror(ADDRESS) / "step=4.ckpt").exists()
    fsspec.filesystem("s3").rm("runs/one/step=2.ckpt")
    assert newest() == str(mirror(ADDRESS) / "step=2.ckpt")  # fetched before
    new_host()
    with pytest.raises(
        UsageError, match=r"none of 1 checkpoint\(s\) in s3://runs/one can be used \(the newest: s3://r"
    ):
        newest()
    fsspec.filesystem("s3").rm("runs/one/step=4.ckpt")
    assert newest() is None


def test_an_outage_is_one_line_a_save_and_ends_with_it(server, monkeypatch):
    class Model(Noisy):
        def on_train_batch_end(self, *_: Any) -> None:
            server.fails = 2 <= self.trainer.global_step < 6

    model = Model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, SafeCheckpoint(ADDRESS, every_n_train_steps=2, permanent_steps=2), max_steps=8)
    lines = [str(warning.message) for warning in caught if "is not uploaded" in str(warning.message)]
    assert 1 <= len(lines) <= 3
    assert "is not uploaded: s3://runs/one/step=" in lines[0]
    assert "not written in 4 tries (" in lines[0]
    assert "Training continues, the next save tries again: the bucket has none yet" in lines[0]
    assert names() == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt", "step=8.ckpt"]


def test_a_record_that_an_outage_hid_is_read_at_the_next_look(server, monkeypatch):
    def out(*_: Any) -> None:
        raise UsageError("not read")

    train(2)
    bucket = Bucket(ADDRESS)
    with monkeypatch.context() as outage:
        outage.setattr("lightning_tricks.checkpoints.bucket.read_part", out)
        assert bucket.look()["step=2.ckpt"].problem == "not read"
    assert bucket.look()["step=2.ckpt"].record.step == 2


MAY_READ = {"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}
POLICY = json.dumps({"Version": "2012-10-17", "Statement": [MAY_READ]})


def test_what_cannot_work_is_one_line_before_the_first_step(server, monkeypatch):
    def refused(line: str, address: str = ADDRESS) -> None:
        model = Noisy()
        fsspec.filesystem("s3").clear_instance_cache()
        with pytest.raises(UsageError, match=f"^{line}[^\n]*$"):
            fit(model, SafeCheckpoint(address))
        assert not model.losses

    refused(
        r"SafeCheckpoint: dirpath=s3://none/one: it is not there \(no such bucket\); check the path", "s3://none/one"
    )
    Path(mirror("s3://full")).parent.mkdir(parents=True)
    mirror("s3://full").touch()
    fsspec.filesystem("s3").mkdir("full")
    refused(r"SafeCheckpoint: dirpath=.*/s3/full is a file: set XDG_CACHE_HOME to another folder", "s3://full/one")
    refused("gopher://a/b: Protocol not known: gopher; check the URL", "gopher://a/b")
    iam = boto3.client("iam", endpoint_url=server.url, region_name="us-east-1")
    iam.create_user(UserName="reader")
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    iam.put_user_policy(
        UserName="reader",
        PolicyName="read",
        PolicyDocument=POLICY,
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    with server.asking_for_rights():
        refused(r"SafeCheckpoint: dirpath=s3://runs/one: access is refused \(Access Denied\); check the credentials")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    refused(r"SafeCheckpoint: dirpath=s3://runs/one: access is refused \(Unable to locate credentials\); check")


def test_the_library_that_is_missing_is_named_before_any_process_is_started(monkeypatch):
    def missing(url: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("lightning_tricks._host.address.url_to_fs", missing)
    saver, strategy = SafeCheckpoint("s3://a/b"), SimpleNamespace(checkpoint_io=AtomicCheckpointIO())
    line = r"^s3://a/b: Install s3fs to access S3; pip install -e '.\[s3\]' in the clone$"
    with pytest.raises(UsageError, match=line):
        saver.check_run(SimpleNamespace(strategy=strategy), None, "validate")


def test_a_folder_of_shards_without_one_of_its_files_is_not_whole(server, tmp_path):
    torch.distributed.checkpoint.save(
        {"state_dict": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "a.ckpt", no_dist=True
    )
    for file in (tmp_path / "a.ckpt").iterdir():
        fsspec.filesystem("s3").put_file(str(file), f"runs/one/a.ckpt/{file.name}")
    with pytest.raises(UsageError, match=r"none of 1 .*incomplete: .*/s3/runs/one/a.ckpt has no meta.pt"):
        newest()
    with pytest.raises(UsageError, match=r"^incomplete: .*/s3/runs/one/a.ckpt has no meta.pt"):
        check_checkpoint(f"{ADDRESS}/a.ckpt")
    with pytest.raises(UsageError, match=r"^s3://runs/one is a folder without a checkpoint: give the checkpoint"):
        check_checkpoint(ADDRESS)
    with pytest.raises(UsageError, match=r"^s3://runs/b.ckpt: it is not there; check the path$"):
        check_checkpoint("s3://runs/b.ckpt")
    with pytest.raises(UsageError, match=r"last.ckpt: it is not there; no address has a last.ckpt: .* step=N.ckpt$"):
        check_checkpoint(f"{ADDRESS}/last.ckpt")


def test_a_part_is_no_checkpoint_and_the_run_that_has_left_it_deletes_it(server, tmp_path):
    for step, run in ((4, "mine"), (6, "another")):
        record = Record(step, number=step, run=run, checksums={"a": 1, "b": 2})
        fsspec.filesystem("s3").pipe_file(f"runs/one/step={step}.ckpt/record.json", to_json(record))
        fsspec.filesystem("s3").pipe_file(f"runs/one/step={step}.ckpt/a", b"a")
    assert newest() is None
    folder = BucketFolder(ADDRESS, Retention(1, 0, "min"), "mine", lambda _: None, leads=True)
    folder.sweep()
    assert folder.largest_number() == 0
    folder.start()
    folder.wait()
    assert names() == ["step=6.ckpt/a", "step=6.ckpt/record.json"]


def test_the_record_of_a_folder_is_put_first_and_deleted_last(server, tmp_path):
    (folder := tmp_path / "step=2.ckpt").mkdir()
    for name in "ab":
        (folder / name).write_text(name)
    (folder / RECORD_FILE).write_bytes(to_json(Record(2, checksums={"a": 1, "b": 2})))
    seen = list[str]()
    server.at_change = lambda number, what: seen.append(what)
    bucket = Bucket(ADDRESS)
    bucket.put(folder)
    fsspec.filesystem("s3").rm("runs/one/step=2.ckpt/b")
    assert bucket.look()["step=2.ckpt"].is_part
    bucket.put(folder)  # what is missing
    assert not bucket.look()["step=2.ckpt"].is_part
    bucket.delete("step=2.ckpt", ["record.json", "a", "b"])
    changes = [(what.split()[0], what.rpartition("/")[2]) for what in seen]
    puts, deletes = ([name for verb, name in changes if verb == kind] for kind in ("PUT", "DELETE"))
    assert puts == ["record.json", "a", "b", "b"]
    assert deletes[-3:] == ["a", "b", "record.json"]
    (folder / RECORD_FILE).write_bytes(to_json(Record(2, run="another")))
    fsspec.filesystem("s3").put_file(str(folder / RECORD_FILE), "runs/one/step=2.ckpt/record.json")
    (folder / RECORD_FILE).write_bytes(to_json(Record(2, run="mine")))
    with pytest.raises(
        UsageError, match=r"^s3://runs/one/step=2.ckpt: another checkpoint has this name: two runs save"
    ):
        bucket.put(folder)


def test_every_reader_takes_an_address(server):
    whole = train(2)
    new_host()
    address = f"{ADDRESS}/step=2.ckpt"
    module = Noisy()
    assert load_weights(module, address).startswith(f"{address}: 4 of its 4 weights loaded")
    assert same(weights_of(module), whole.weights)
    assert same(fit(Noisy(), InitFrom(address), data=DATA, max_steps=0).weights, whole.weights)
    streamed = stream_weights(address)
    assert all(torch.equal(streamed.read(name), value) for name, value in module.state_dict().items())
    before = server.changes
    loaded = Noisy.load_from_checkpoint(check_checkpoint(address), strict=False)
    assert same(weights_of(loaded), whole.weights)
    assert server.changes == before


def test_runs_below_an_address_are_found_by_auto(server):
    root = "s3://runs/root"
    for version in (2, 10):
        logger = CSVLogger("s3://runs/root", "tiny", version)
        train(2, SafeCheckpoint(every_n_train_steps=2), logger=logger)
    assert newest(SafeCheckpoint(), CSVLogger(root, "tiny")).endswith("runs/root/tiny/version_10/checkpoints/last.ckpt")
    fsspec.filesystem("s3").rm("runs/root/tiny/version_10", recursive=True)
    shutil.rmtree(mirror(root))
    assert newest(SafeCheckpoint(), CSVLogger(root, "tiny")).endswith(
        "runs/root/tiny/version_2/checkpoints/step=2.ckpt"
    )
