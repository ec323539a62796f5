"""Runs that save to a bucket and are killed at moments of an upload go on on an empty host, to the bit."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from guards import bucket_run
from harness import processes
from harness.s3_server import Server, fsspec, prepare

from lightning_tricks.checkpoints.bucket import Bucket
from lightning_tricks.checkpoints.record import RECORD_FILE

pytestmark = pytest.mark.long


@pytest.fixture
def server(s3_server, monkeypatch, tmp_path):
    return prepare(s3_server, monkeypatch, tmp_path, "runs")


def start(place: str, cache: Path, world: int, told: Path) -> Any:
    told.mkdir()
    return processes.start(bucket_run.ranks if world > 1 else bucket_run.alone, place, cache, told, world=world)


def pids(told: Path, world: int) -> list[int]:
    while True:
        try:
            return [json.loads((told / str(rank)).read_text()) for rank in range(world)]
        except (OSError, ValueError):
            time.sleep(0.05)


def changes(server: Server) -> list[str]:
    """Note the changes from now on."""
    seen: list[str] = []
    server.at_change = lambda number, what: seen.append(what)
    return seen


def newest_whole(place: str) -> int:
    """The newest step that is there as a whole; 0 for none."""
    found = Bucket(place).look()
    whole = {one.record.step for one in found.values() if not one.is_part}
    assert all(one.record for one in found.values()), "even a part tells whose it is"
    return max(whole, default=0)


def kill_and_go_on(server: Server, tmp_path: Path, world: int, number: int, after: bool, whole: Any) -> None:
    place, name = f"s3://runs/{number}-{after}", f"{number}-{after}"
    server.kill_at(number, after, lambda: pids(tmp_path / f"{name}-told", world))
    run = start(place, tmp_path / name, world, tmp_path / f"{name}-told")
    with pytest.raises(Exception, match="signal SIGKILL"):
        processes.end(run)
    server.at_change = None
    newest = newest_whole(place)
    results = processes.end(start(place, tmp_path / f"{name}-new", world, tmp_path / f"{name}-again"))
    for (losses, weights), (all_losses, all_weights) in zip(results, whole, strict=True):
        assert losses == all_losses[newest:]
        assert all(map(torch.equal, weights, all_weights))
    left = sorted({path.split("/")[2] for path in fsspec.filesystem("s3").find(place.removeprefix("s3://"))})
    steps = {int(name.removeprefix("step=").split(".")[0].split("-")[0]) for name in left}
    assert {3, bucket_run.STEPS} <= steps
    if 0 < newest < bucket_run.STEPS:  # else another run has begun, or nothing was left to do
        assert steps <= {3, bucket_run.STEPS, newest}  # the one that it was resumed from stays
        assert not any(one.is_part for one in Bucket(place).look().values())


@pytest.mark.parametrize("world", [1, 2])
def test_a_kill_at_any_change_of_the_bucket_costs_at_most_what_was_not_there(server, tmp_path, world):
    seen = changes(server)
    whole = processes.end(start("s3://runs/whole", tmp_path / "whole", world, tmp_path / "whole-told"))
    assert [len(losses) for losses, _ in whole] == [bucket_run.STEPS] * world
    assert any(what.startswith("DELETE") for what in seen[3:])
    if world == 2:
        assert {RECORD_FILE, ".metadata", "meta.pt", "__1_0.distcp"} <= {what.rpartition("/")[2] for what in seen}
    draw = random.Random(world)
    moments = [*sorted(draw.sample(range(4, len(seen) - 1), 3)), len(seen) - 1]
    for number in moments:
        kill_and_go_on(server, tmp_path, world, number, draw.random() < 0.5, whole)


def test_each_of_two_hosts_uploads_its_files_and_fetches_what_it_lacks(server, tmp_path):
    whole = processes.run(bucket_run.hosts, "s3://runs/whole", tmp_path / "whole")
    for rank in (0, 1):
        folder = tmp_path / "whole" / str(rank) / "lightning_tricks/checkpoints/s3/runs/whole/step=5.ckpt"
        assert [path.name for path in folder.glob("*.distcp")] == [f"__{rank}_0.distcp"]
    found = Bucket("s3://runs/whole").look()
    assert {name: one.is_part for name, one in found.items()} == {"step=3.ckpt": False, "step=5.ckpt": False}
    fsspec.filesystem("s3").rm("runs/whole/step=5.ckpt", recursive=True)
    again = processes.run(bucket_run.hosts, "s3://runs/whole", tmp_path / "new")
    for (losses, weights), (all_losses, all_weights) in zip(again, whole, strict=True):
        assert losses == all_losses[3:]
        assert all(map(torch.equal, weights, all_weights))
