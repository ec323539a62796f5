"""A run that loses two of its four hosts, gets two others, and loses one process: the rows of every step stay.

Each host is a torchrun of its own with one process, as on hosts that an operator starts and takes away. The run waits
at the steps where something happens to its hosts, and the test for the files by which it says so.
"""

import base64
import csv
import json
import os
import pickle
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness.preloaded import left_over, python
from harness.processes import free_port, threads
from test_launching import LIMIT, RECIPE, Job, torchrun
from torch.distributed import TCPStore

from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import Preemption
from lightning_tricks.checkpoints.record import read_record
from lightning_tricks.data import ShardWriter
from lightning_tricks.logs.ledger_file import NAME

pytestmark = [pytest.mark.long, pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")]

# of the same rows a step, on four processes and on two
OF_FOUR = {"accumulate_grad_batches": 6, "val_check_interval": 18, "limit_val_batches": 3}
OF_TWO = {name: 2 * value for name, value in OF_FOUR.items()}
EVERY = 2  # steps between saves
LOST, BACK, KILLED, STEPS = 3, 6, 10, 12  # steps done when two hosts are lost, when others come, and at a kill
ELASTIC = (
    RECIPE.replace("max_steps: 6", f"max_steps: {STEPS}")
    .replace(
        "ModelCheckpoint, init_args: {every_n_train_steps: 3, save_last: link}}",
        """SafeCheckpoint, init_args: {every_n_train_steps: 2, keep_last: 9}}
    - {class_path: RunLedger}
    - {class_path: GoodputMonitor}
    - {class_path: BatchSizeWarmup, init_args: {stages: {0: 12, 6: 24}}}""",
    )
    .replace(
        "limit_val_batches: 0",
        "limit_val_batches: 3\n  val_check_interval: 18\n  check_val_every_n_epoch: null\n  accumulate_grad_batches: 6",
    )
    .replace('train: "data/train*.bin",', 'train: "data/train*.bin", val: "data/val*.bin",')
)


class Hosts(pl.Callback):
    """Makes a run wait for what happens to its hosts; works from a recipe.

    Files in the run's folder say what has happened: `lost`, `back`, `killed`. A start with another number of processes
    than these tell waits until torchrun ends it: not all hosts have come.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        here = Path.cwd()
        expected = 2 if (here / "lost").exists() and not (here / "back").exists() else 4
        if trainer.world_size != expected:
            threading.Event().wait()  # SIGTERM ends it

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        host, step = os.environ["HOST"], trainer.global_step
        if step == LOST and not Path("lost").exists() and host in "23":
            tell(f"pid {host}", str(os.getpid()))
            threading.Event().wait()  # for its end
        if step == BACK and trainer.world_size == 2 and host == "0":
            tell("two are here", "")
            signals = next(one for one in trainer.callbacks if isinstance(one, Preemption))._signals
            while not signals.received:  # of torchrun, because others have come
                time.sleep(0.02)
        if step == KILLED and host == "1" and not Path("killed").exists():
            tell("killed", "")
            os.kill(os.getpid(), signal.SIGKILL)


def tell(name: str, text: str) -> None:
    Path(f"{name}.part").write_text(text)
    Path(f"{name}.part").rename(name)


class Operator:
    """Keeps a torchrun on each host, as Kubernetes keeps a pod: one that ends with an error is started again.

    On a busy machine a torchrun may join a rendezvous that the others have left. It then waits a minute for their
    address and ends with an error, and the others wait for it.
    """

    def __init__(self, job: Job, port: int) -> None:
        self.job, self.port = job, port
        self.torchruns: dict[int, subprocess.Popen] = {}  # by the host

    def start(self, host: int, nnodes: str = "1:4") -> None:
        callback = json.dumps({"class_path": "test_elastic_launching.Hosts"})
        self.job.start(
            python(), "-m", "torch.distributed.run", "--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", "9",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}", "--rdzv-id", "toy",
            "--rdzv-conf", "last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=10,is_host=0",
            "-m", "lightning_tricks", "fit", "--config", "toy.yaml", "--resume=auto", "--elastic=true",
            f"--trainer.callbacks+={callback}", HOST=str(host), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )  # fmt: skip
        self.torchruns[host] = self.job.started[-1]

    def lose(self, host: int) -> None:
        """Take the host away, with its torchrun and its process."""
        self.torchruns.pop(host).kill()
        os.kill(int((self.job.folder / f"pid {host}").read_text()), signal.SIGKILL)

    def wait_until(self, condition: Callable[[], bool], seconds: float = LIMIT) -> None:
        deadline = time.time() + seconds
        while not condition():
            assert time.time() < deadline, self.job.out[-5000:]
            for host, process in list(self.torchruns.items()):
                if process.poll() not in (None, 0):
                    self.start(host)
            time.sleep(0.05)

    def wait_for(self, *names: str) -> None:
        """Until the run has told these files."""
        self.wait_until(lambda: all((self.job.folder / name).exists() for name in names))

    @property
    def all_have_ended(self) -> bool:
        return all(process.poll() == 0 for process in self.torchruns.values())


def came(store: TCPStore) -> int:
    """The number of torchruns that have joined: `C10dRendezvousBackend` keeps its state under this key."""
    key = "torch.rendezvous.toy"
    state = base64.b64decode(store.get(key)) if store.check([key]) else b""
    return len(pickle.loads(state).participants) if state.startswith(b"\x80") else 0


def four_two_four(job: Job) -> None:
    """The store is in this process. The torchruns that come first ask for four, so that the first start has four."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    operator = Operator(job, store.port)
    for host in (2, 3):
        operator.start(host, "4:4")
    operator.wait_until(lambda: came(store) == 2)
    for host in (0, 1):
        operator.start(host)
    operator.wait_for("pid 2", "pid 3")
    (job.folder / "lost").touch()
    for host in (2, 3):
        operator.lose(host)
    operator.wait_for("two are here")
    (job.folder / "back").touch()
    for host in (4, 5):
        operator.start(host)
    operator.wait_until(lambda: operator.all_have_ended, 2 * LIMIT)
    job.finish()


def unbroken(job: Job) -> None:
    torchrun(job, 4, "--trainer.num_nodes=1")
    job.finish()


def kubernetes(job: Job) -> None:
    """Both pods of the PyTorchJob in docs/launching.md, at toy size: a process each, and a recipe of this file."""
    page = (Path(__file__).parent.parent / "docs/launching.md").read_text()
    (manifest,) = (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S))
    assert manifest["kind"] == "PyTorchJob"
    variables = operator_variables(manifest)
    assert variables["PET_RDZV_ENDPOINT"] == "llama7b-worker-0:23456"
    (container,) = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    variables |= {entry["name"]: entry["value"] for entry in container["env"]}
    variables["PET_RDZV_ENDPOINT"] = f"localhost:{free_port()}"  # worker-0 is this machine
    toys = {"8": "1", "recipes/llama7b.yaml": "toy.yaml", "recipes/parts/2x8.yaml": "parts.yaml"}
    launcher, *words = (toys.get(word, word) for word in container["command"])
    assert launcher == "torchrun"
    assert toys.keys() <= set(container["command"])
    full = {"num_nodes": 2, "devices": 1, **OF_TWO}
    (job.folder / "parts.yaml").write_text(yaml.safe_dump({"trainer": full}))
    for _ in range(manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]):
        job.start(python(), "-m", "torch.distributed.run", *words, **variables)
    job.finish()


def operator_variables(manifest: dict[str, Any]) -> dict[str, str]:
    """What the Training Operator sets for torchrun in each pod of an elastic job: `ElasticEnvVarGenerator` in its
    pkg/controller.v1/pytorch/elastic.go, https://github.com/kubeflow/training-operator.
    """
    policy = manifest["spec"]["elasticPolicy"]
    (container,) = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    (port,) = (port["containerPort"] for port in container["ports"] if port["name"] == "pytorchjob-port")
    found = {
        "PET_RDZV_ENDPOINT": f"{manifest['metadata']['name']}-worker-0:{port}",
        "PET_RDZV_BACKEND": policy.get("rdzvBackend", "c10d"),
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }
    if conf := policy.get("rdzvConf"):
        found["PET_RDZV_CONF"] = ",".join(f"{entry['key']}={entry['value']}" for entry in conf)
    return found


def mesh(job: Job) -> None:
    """Two tensor ranks for each of two shards; one process is killed, and two tensor ranks go on."""
    fails = json.dumps({"class_path": "harness.runs.Fail", "init_args": {"rank": 3, "step": 5}})
    full = {"num_nodes": 1, "devices": 4, **OF_TWO}
    for processes, more in (("4", [f"--trainer.callbacks+={fails}"]), ("2", [])):
        job.start(
            python(), "-m", "torch.distributed.run", "--nproc-per-node", processes, "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", "-m", "lightning_tricks", "fit", "--config", "toy.yaml",
            "--resume=auto", "--elastic=true", "--trainer.strategy.init_args.mesh={tensor: 2}",
            *(f"--trainer.{name}={value}" for name, value in full.items()), *more,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )  # fmt: skip
        job.finish()


RUNS: dict[str, Callable[[Job], None]] = {
    "unbroken": unbroken, "elastic": four_two_four, "kubernetes": kubernetes, "mesh": mesh,
}  # fmt: skip


def prepare(folder: Path) -> Job:
    (folder / "toy.yaml").write_text(ELASTIC.replace("trainer:\n", "trainer:\n  num_nodes: 4\n  devices: 1\n"))
    (folder / "data").mkdir()
    for name, seed, tokens in (("train", 0, 20_000), ("val", 1, 1000)):
        with ShardWriter(folder / "data", name, vocab_size=64) as writer:
            writer.append(torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(seed)).numpy())
    return Job(folder)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> Iterator[dict[str, Job]]:
    """The unbroken run and the one that loses its hosts."""
    made = {name: prepare(tmp_path_factory.mktemp(name)) for name in RUNS}
    python()
    try:
        for names in (("unbroken", "elastic"), ("kubernetes", "mesh")):  # more at once take longer
            with threads({name: (RUNS[name], made[name]) for name in names}) as wait:
                for name in names:
                    wait(name)
                    assert made[name].codes[-1] == 0, made[name].out[-5000:]
        yield made
    finally:
        for job in made.values():
            for pid in left_over(job.folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def ledger(job: Job) -> dict[int, set[tuple[str, str]]]:
    """The samples of each step, and the sum over their bits, as often as the step was trained."""
    found: dict[int, set[tuple[str, str]]] = {}
    for line in map(json.loads, (run_folder(job) / NAME).read_text().splitlines()):
        if "samples" in line:
            found.setdefault(line["step"], set()).add((str(line["samples"]), line["batch"]))
    return found


def logged(job: Job, name: str) -> dict[int, list[str]]:
    """What was logged by that name at each step."""
    found: dict[int, list[str]] = {}
    for row in csv.DictReader((run_folder(job) / "metrics.csv").open()):
        if row[name]:
            found.setdefault(int(row["step"]), []).append(row[name])
    return found


def run_folder(job: Job) -> Path:
    """The folder of the run: starts before all hosts had come, on a busy machine, have empty ones."""
    (folder,) = {path.parent for path in job.folder.glob(f"runs/toy/*/{NAME}")}
    return folder


def test_the_run_went_on_with_two_and_then_with_four_in_one_folder(jobs):
    job = jobs["elastic"]
    assert job.codes.count(-signal.SIGKILL) == 2
    assert job.codes.count(0) == 4
    lines = map(json.loads, (run_folder(job) / NAME).read_text().splitlines())
    starts = [(line["start"], line["processes"], line["micro_batches"]) for line in lines if "start" in line]
    assert [start[1:] for start in starts] == [(4, 6), (2, 12), (4, 6), (4, 6)]
    assert [start[0] for start in starts] == sorted(start[0] for start in starts)
    changes = "accumulate_grad_batches 6 -> 12, val_check_interval 18 -> 36, limit_val_batches 3 -> 6"
    assert f"elastic: 2 of 4 processes, {changes}\n" in job.out
    assert "elastic: 4 of 4 processes\n" in job.out
    assert "Stopped by SIGTERM after step" in job.out  # because others came
    assert set(re.findall("^Going on from step .* of (.*)/checkpoints/", job.out, re.M)) == {
        f"runs/toy/{run_folder(job).name}"
    }


def test_the_rows_of_every_step_are_those_of_the_unbroken_run(jobs):
    expected = ledger(jobs["unbroken"])
    assert sorted(expected) == list(range(STEPS))
    assert all(len(lines) == 1 for lines in expected.values())
    assert ledger(jobs["elastic"]) == expected


def test_losses_are_equal_to_the_bit_until_the_first_step_of_two_and_to_rounding_after_it(jobs):
    expected, found = (logged(jobs[name], "train/loss") for name in ("unbroken", "elastic"))
    assert sorted(found) == sorted(expected) == list(range(STEPS))
    assert all(len(values) == 1 for values in found.values())  # each step once
    first = LOST // EVERY * EVERY  # step of the checkpoint from which two went on
    assert [found[step] for step in range(first)] == [expected[step] for step in range(first)]
    differences = [abs(float(found[step][0]) - float(expected[step][0])) for step in range(STEPS)]
    assert max(differences) < 1e-5  # sums in another order: some units of the last place, 5e-7 at a loss of ln 64


def test_validations_come_at_the_same_steps_over_the_same_rows(jobs):
    expected, found = (logged(jobs[name], "val/loss") for name in ("unbroken", "elastic"))
    assert list(found) == list(expected)
    assert len(expected) == 3
    for step, values in expected.items():
        assert float(found[step][0]) == pytest.approx(float(values[0]), abs=1e-5)


def test_the_last_checkpoint_is_of_the_last_step_and_the_recipe_in_the_folder_is_that_of_four(jobs):
    folder = run_folder(jobs["elastic"])
    assert read_record(folder / "checkpoints/last.ckpt").step == STEPS
    trainer = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]
    assert ({"num_nodes": 4, "devices": 1} | OF_FOUR).items() <= trainer.items()


def test_the_pods_of_the_page_train_by_its_command_and_the_operators_variables(jobs):
    job = jobs["kubernetes"]
    assert job.codes == [0, 0]
    assert "elastic: 2 of 2 processes\n" in job.out
    assert ledger(job) == ledger(jobs["unbroken"])


def test_a_mesh_of_tensor_ranks_goes_on_with_fewer_shards(jobs):
    job, expected = jobs["mesh"], logged(jobs["unbroken"], "train/loss")
    changes = "accumulate_grad_batches 12 -> 24, val_check_interval 36 -> 72, limit_val_batches 6 -> 12"
    assert job.codes == [1, 0]
    assert f"elastic: 2 of 4 processes, {changes}\n" in job.out
    assert "Going on from step 4 " in job.out
    assert ledger(job) == ledger(jobs["unbroken"])
    found = logged(job, "train/loss")
    assert sorted(found) == list(range(STEPS))
    for step, values in found.items():
        assert [float(value) for value in values] == pytest.approx([float(expected[step][0])], abs=1e-5)
