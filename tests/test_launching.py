"""A distributed run as a user starts it: by each launcher the same training, and an end when a process of it fails.

Each run is a command line in real processes, at toy size, on CPUs with gloo, in a folder of its own, by which its
processes are known. They are forked from a server that has imported everything (`preloaded`). A run is made once and
looked at by all tests that have something to ask of it; a few go on beside each other, as much of what they do is wait.
"""

import csv
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.preloaded import left_over, python
from harness.processes import LAUNCHED, free_port, threads

from lightning_tricks.checkpoints.open_checkpoint import load_file
from lightning_tricks.commands.consolidate import run as consolidate
from lightning_tricks.data import ShardWriter

pytestmark = [pytest.mark.long, pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")]
RECIPE = """
seed_everything: 0
model:
  class_path: LanguageModel
  init_args:
    decoder: {class_path: Llama, init_args: {vocab_size: 64, d_model: 32, n_layers: 2, n_heads: 2, max_seq_len: 32}}
    optimizer: {class_path: AdamW, init_args: {lr: 1.0e-2}}
    schedule: {class_path: WarmupLinear, init_args: {warmup_steps: 2}}
data:
  class_path: TokenData
  init_args: {train: "data/train*.bin", vocab_size: 64, seq_len: 32, micro_batch_size: 2}
trainer:
  accelerator: cpu
  strategy: {class_path: FSDP2Strategy, init_args: {timeout_seconds: 600}}
  max_steps: 6
  log_every_n_steps: 1
  limit_val_batches: 0
  gradient_clip_val: 1.0
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: ResumingCSVLogger, init_args: {save_dir: runs, name: toy}}
  callbacks:
    - {class_path: ModelCheckpoint, init_args: {every_n_train_steps: 3, save_last: link}}
"""
GUARDED = RECIPE.replace(
    "ModelCheckpoint, init_args: {every_n_train_steps: 3, save_last: link}}",
    """SafeCheckpoint, init_args: {every_n_train_steps: 3}}
    - {class_path: ExactResume}
    - {class_path: HangWatchdog, init_args: {limit_seconds: 5, abort: true}}""",
).replace("max_steps: 6", "max_steps: 7")
GONE = (
    r"^rank {rank} of {world} on \S+ is gone without a word \(process \d+\): killed, or out of memory \(dmesg tells\)$"
)
LIMIT = 280.0  # seconds, above which a run that should end well hangs
MESH = "--trainer.strategy.init_args.mesh={shard: 2, tensor: 2}"
STAGES = "--trainer.strategy.init_args={mesh: {pipeline: 2}, pipeline_micro_batches: 2}"


class Job:
    """The processes of one run, started in `folder`; what they print goes to `folder/out`, in its order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen] = []
        self.codes: list[int] = []
        self.seconds = 0.0  # from the failure that was wanted to the end of the last process

    def start(self, *command: str, **env: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        env = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env}
        with (self.folder / "out").open("a") as out:
            self.started.append(
                subprocess.Popen(command, cwd=self.folder, env=env, stdout=out, stderr=subprocess.STDOUT)
            )

    def finish(self, seconds: float = LIMIT) -> float:
        """Wait until no process of the run is left; when that was, and its exit codes. Kills what is left then."""
        deadline = time.time() + seconds
        while time.time() < deadline and any(process.poll() is None for process in self.started):
            time.sleep(0.05)
        while (alive := left_over(self.folder)) and time.time() < deadline:
            time.sleep(0.2)
        ended = time.time()
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.codes = [process.wait() for process in self.started]
        assert not alive, f"{len(alive)} processes were still there:\n{self.out[-5000:]}"
        return ended

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def losses(self) -> list[str]:
        """The training loss of every step, as it was written, to the last digit."""
        rows = csv.DictReader((self.folder / "runs/toy/version_0/metrics.csv").open())
        return [row["train/loss"] for row in rows if row["train/loss"]]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.weights_of("last")

    def weights_of(self, checkpoint: str) -> dict[str, torch.Tensor]:
        whole = self.folder / f"whole {checkpoint}.ckpt"
        consolidate([str(self.folder / f"runs/toy/version_0/checkpoints/{checkpoint}.ckpt"), str(whole)])
        return load_file(whole, None)["state_dict"]


def fit(devices: int, *overrides: str, fail: dict[str, Any] | None = None, grace: float | None = None) -> list[str]:
    """What follows `python` on the command line."""
    command = ["-m", "lightning_tricks", "fit", "--config", "toy.yaml", f"--trainer.devices={devices}", *overrides]
    added = [("harness.runs.Fail", fail), ("RankMonitor", None if grace is None else {"grace_seconds": grace})]
    for class_path, init_args in added:
        if init_args is not None:
            command.append(f"--trainer.callbacks+={json.dumps({'class_path': class_path, 'init_args': init_args})}")
    return command


def torchrun(job: Job, devices: int, *overrides: str, **options: Any) -> None:
    job.start(
        python(), "-m", "torch.distributed.run", "--nproc-per-node", str(devices), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", *fit(devices, *overrides, **options),
    )  # fmt: skip


def lightning(job: Job, devices: int, *overrides: str, **options: Any) -> None:
    job.start(python(), *fit(devices, *overrides, **options))


def slurm(job: Job, devices: int, *overrides: str, ranks: tuple[int, ...] | None = None, **options: Any) -> None:
    """What srun sets, for each task of one node; Lightning takes the port from the job's id."""
    while (port := free_port()) >= 25_000:  # they begin at 15,000, as Lightning's do
        pass
    for rank in ranks or range(devices):
        env = {
            "NTASKS": devices, "NTASKS_PER_NODE": devices, "NNODES": 1, "PROCID": rank, "LOCALID": rank, "NODEID": 0,
            "NODELIST": "127.0.0.1", "JOB_ID": f"77{port - 15000:04d}", "JOB_NAME": "train",
        }  # fmt: skip
        command = fit(devices, *overrides, **options)
        job.start(python(), *command, **{f"SLURM_{name}": str(value) for name, value in env.items()})


def on_two_hosts(job: Job, **options: Any) -> None:
    """Two addresses of this machine, each with a torchrun of its own."""
    addresses, port = ("127.0.0.2", "127.0.0.3"), str(free_port())
    for rank, address in enumerate(addresses):
        job.start(
            python(), "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank),
            "--nproc-per-node", "1", "--master-addr", addresses[0], "--master-port", port,
            "--local-addr", address, *fit(1, "--trainer.num_nodes=2", **options), GLOO_SOCKET_IFNAME="lo",
        )  # fmt: skip


def trains(job: Job, kind: Any, *args: Any, **options: Any) -> None:
    """Run to the end."""
    kind(job, *args, **options)
    job.finish()


def fails(job: Job, kind: Any, *args: Any, **options: Any) -> None:
    """Run to the failure and the end of it."""
    kind(job, *args, **options)
    ended = job.finish()
    assert all(job.codes), job.out[-5000:]
    job.seconds = ended - float((job.folder / "failed_at").read_text())


def goes_on(job: Job, devices: int, *overrides: str, **options: Any) -> None:
    """Fail, and go on from the last checkpoint."""
    fails(job, torchrun, devices, *overrides, **options)
    (job.folder / "out").rename(job.folder / "first_out")
    trains(job, torchrun, devices, *overrides, "--ckpt_path=last")


def is_alone(job: Job, came: int) -> None:
    """One of two ranks starts, and waits for the other."""
    slurm(job, 2, "--trainer.strategy.init_args.timeout_seconds=4", ranks=(came,))
    job.finish(100)


HANGS = {"rank": 1, "step": 6, "how": "hang"}


# by name, in the order of the tests: what to do with a job of its own
RUNS: dict[str, Callable[[Job], None]] = {
    "torchrun": lambda job: trains(job, torchrun, 2),
    "lightning": lambda job: trains(job, lightning, 2),
    "slurm": lambda job: trains(job, slurm, 2),
    "two hosts": lambda job: trains(job, on_two_hosts),
    "goes on": lambda job: goes_on(job, 2, fail={"rank": 1, "step": 5}),
    "child is killed": lambda job: fails(job, lightning, 2, fail={"rank": 1, "step": 2}),
    "first is killed": lambda job: fails(job, lightning, 3, fail={"rank": 0, "step": 2, "others": "stuck"}, grace=4.0),
    "killed far away": lambda job: fails(job, on_two_hosts, fail={"rank": 1, "step": 2, "others": "sleep"}, grace=3.0),
    "raises": lambda job: fails(job, torchrun, 3, fail={"rank": 1, "step": 2, "how": "raise"}),
    "rank 0 alone": lambda job: is_alone(job, 0),
    "rank 1 alone": lambda job: is_alone(job, 1),
    # the one that hangs in step 7 is the unbroken run of six steps for the one that is killed in step 5
    "mesh hangs": lambda job: fails(job, torchrun, 4, MESH, fail=HANGS),
    "mesh killed": lambda job: goes_on(job, 4, MESH, fail={"rank": 2, "step": 4}),
    "mesh of stages": lambda job: trains(job, torchrun, 4, STAGES),
    "mesh of stages killed": lambda job: goes_on(job, 4, STAGES, fail={"rank": 2, "step": 4}),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Iterator[Callable[[str], Job]]:
    """A function that waits for the run of that name; ends what is left of all."""
    jobs = {name: Job(tmp_path_factory.mktemp(name.replace(" ", "_"))) for name in RUNS}
    for name, job in jobs.items():
        (job.folder / "toy.yaml").write_text(GUARDED if name.startswith("mesh") else RECIPE)
        (job.folder / "data").mkdir()
        with ShardWriter(job.folder / "data", "train", vocab_size=64) as writer:
            writer.append(torch.randint(0, 64, (4000,), generator=torch.Generator().manual_seed(0)).numpy())
    python()
    with threads({name: (RUNS[name], job) for name, job in jobs.items()}) as wait:
        yield lambda name: (wait(name), jobs[name])[1]
    for job in jobs.values():
        for pid in left_over(job.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def one_host(ended) -> Job:
    job = ended("torchrun")
    assert job.codes == [0], job.out[-5000:]
    return job


@pytest.mark.parametrize("launcher", ["lightning", "slurm", "two hosts"])
def test_every_launcher_trains_the_same(launcher, one_host, ended):
    job = ended(launcher)
    assert set(job.codes) == {0}, job.out[-5000:]
    assert len(job.losses) == 6
    assert job.losses == one_host.losses


def first_error(out: str) -> str:
    """The first line that reads like one, but for what launchers say of processes that they end."""
    return next(line for line in out.splitlines() if re.search("Error|Traceback|gone without|failed first", line))


def test_a_rank_is_killed_and_the_run_goes_on_to_the_same_weights(one_host, ended):
    job = ended("goes on")
    assert job.seconds < 60
    out = (job.folder / "first_out").read_text(errors="replace")
    said = re.findall(GONE.format(rank=1, world=2), out, re.M)
    assert len(said) == 1
    assert first_error(out) == said[0]
    assert "Connection closed" not in out
    assert job.codes[-1] == 0, job.out[-5000:]
    weights, expected = job.weights, one_host.weights
    assert weights.keys() == expected.keys()
    assert all(torch.equal(expected[name], value) for name, value in weights.items())
    assert job.losses == one_host.losses  # each step once


@pytest.mark.parametrize("name", ["child is killed", "killed far away"])
def test_under_lightnings_launcher_and_on_another_host_a_killed_rank_is_named_and_none_is_left(name, ended):
    job = ended(name)
    assert job.seconds < 60
    assert len(re.findall(GONE.format(rank=1, world=2), job.out, re.M)) == 1
    assert name == "killed far away" or "Traceback" not in job.out


def test_when_the_first_process_is_killed_the_others_say_so_and_end_though_they_are_stuck(ended):
    job = ended("first is killed")
    assert 4 <= job.seconds < 60  # for ever, where nobody looks
    assert len(re.findall(GONE.format(rank=0, world=3), job.out, re.M)) == 2
    assert first_error(job.out).startswith("rank 0 of 3")
    for rank in (1, 2):
        assert f"rank {rank} is ended, 4 s later it was still here:" in job.out
    assert "pthreads.pthread_mutex_lock(mutex)" in job.out  # where


def test_a_rank_that_raises_shows_its_traceback_and_the_others_its_line(ended):
    job = ended("raises")
    assert job.seconds < 60
    said = re.findall(r"^rank 1 of 3 on \S+ failed first: ValueError: bad batch$", job.out, re.M)
    assert len(said) == 3
    assert first_error(job.out) == said[0]
    assert len(re.findall("ValueError: bad batch$", job.out, re.M)) == 4  # the three lines, one traceback
    assert not re.search(r"\[rank[02]\]|Connection closed", job.out)


@pytest.mark.parametrize("came", [0, 1])
def test_a_rank_that_never_comes_is_waited_for_as_long_as_was_said(came, ended):
    job = ended(f"rank {came} alone")
    assert job.codes == [2], job.out[-5000:]
    said = re.findall("^error: the processes have not met .*timeout_seconds", job.out, re.M)
    assert len(said) == 1, job.out[-5000:]
    assert "Traceback" not in job.out


def test_a_rank_of_a_mesh_that_hangs_is_named_though_its_neighbours_hold_up_the_others(ended):
    """Ranks 0 and 3 have a group with rank 1 each, rank 2 has none: it waits for them."""
    job = ended("mesh hangs")
    said = {re.sub(r" for \d+ s", "", line) for line in job.out.splitlines() if " behind" in line}  # each rank's own
    assert len(said) == 1, job.out[-5000:]
    assert re.match(r"HangWatchdog: rank 1 of 4 on \S+ is behind: in the forward of step 7: threading.py:", said.pop())
    assert "in the optimizer of step 7" not in job.out  # a strategy's own backward is a backward
    assert job.out.count("is ended, with exit code 1") == 4


@pytest.mark.parametrize(
    ("whole", "broken", "steps"),
    [("mesh hangs", "mesh killed", 6), ("mesh of stages", "mesh of stages killed", 7)],
    ids=["tensor ranks", "stages"],
)
def test_a_rank_of_a_mesh_is_killed_and_the_run_goes_on_to_the_same_weights(whole, broken, steps, ended):
    unbroken, job = ended(whole), ended(broken)
    assert job.seconds < 60
    out = (job.folder / "first_out").read_text(errors="replace")
    said = re.findall(GONE.format(rank=2, world=4), out, re.M)
    assert len(said) == 3
    assert first_error(out) == said[0]
    assert job.codes[-1] == 0, job.out[-5000:]
    assert "Going on from step 3 " in job.out
    assert len(unbroken.losses) == steps
    assert job.losses[:steps] == unbroken.losses
    assert len(job.losses) == 7
    weights, expected = job.weights_of(f"step={steps}"), unbroken.weights_of(f"step={steps}")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(expected[name], value) for name, value in weights.items())
