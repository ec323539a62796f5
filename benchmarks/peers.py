"""What a training step costs in hand-written loops, transformers, litgpt, Lightning and here, on a CPU.

    python -m benchmarks.peers                                    # 5M, eager and compiled, fp32 and bf16
    python -m benchmarks.peers --sizes 30M --rounds 3 --steps 2 --warmup 2
    python -m benchmarks.peers --install_litgpt                   # with pip, into a folder of its own

Each peer trains in a process of its own that stays up, on one thread. In each round every peer runs some steps while
the others wait, in an order that is rotated from round to round. A ratio is taken within its round. `peer_loops.py`
has the peers.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks

import numpy as np
import torch

from benchmarks import machine
from benchmarks.feed import Batch
from benchmarks.overhead import ratios
from benchmarks.peer_loops import BETAS, CLIP, DECAY, LOG_EVERY, LR, PEERS, Job
from lightning_tricks.accounting import training_flops_per_token
from lightning_tricks.accounting.device_speed import bf16_time_ratio
from lightning_tricks.models import Llama

REPOSITORY = Path(__file__).resolve().parents[1]
LITGPT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning_tricks/litgpt"
BASE, PEAK = "bare_hand", "peak"
PRODUCT = 1024  # rows of the square matrices whose product is the peak
NEEDS = {"bare_hf": "transformers", "lightning_hf": "transformers", "hf_trainer": "accelerate", "litgpt": "litgpt"}
COMPARED = 20  # first steps whose losses are compared
SLOW_BF16 = 2.0  # a bf16 product that takes this many times as long as in fp32 is emulated


class Size(NamedTuple):
    """A model and its batch, rows of `length` tokens."""

    shape: dict[str, Any]
    rows: int
    length: int


SIZES = {
    "toy": Size({"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64}, 2, 16),
    "5M": Size({"vocab_size": 4096, "d_model": 256, "n_layers": 4, "n_heads": 4, "d_ff": 688}, 8, 256),
    "30M": Size({"vocab_size": 4096, "d_model": 512, "n_layers": 8, "n_heads": 8, "d_ff": 1376}, 4, 512),
}


def llama(size: Size) -> Llama:
    """The architecture of a size."""
    return Llama(**size.shape, max_seq_len=size.length)


def token_batches(size: Size, count: int = 32) -> list[Batch]:
    """Batches of independent tokens, the k-th of the vocabulary with a probability that goes as 1 / k."""
    vocabulary = size.shape["vocab_size"]
    odds = 1 / np.arange(1, vocabulary + 1)
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.choice(vocabulary, (count, size.rows, size.length + 1), p=odds / odds.sum()))
    return [{"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()} for rows in ids]


# In the process of a peer


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def obey(batches: Sequence[Batch], losses: list[torch.Tensor], orders: TextIO, answers: TextIO) -> Iterator[Batch]:
    """Batches without end. Each order is a number of steps, at the end of which the answer tells what they took.

    Lightning fetches one batch ahead: there the last step of an order is run in the next one, and between two answers
    lie as many steps as the order says, from the second order on.
    """
    left, told, began = 0, 0, (0.0, 0.0)
    for index, batch in enumerate(itertools.cycle(batches)):
        if left == 0:
            now = _cpu_seconds(), time.perf_counter()
            report = {"cpu": now[0] - began[0], "wall": now[1] - began[1]} if index else {}
            news = [float(loss) for loss in losses[told:]]
            told += len(news)
            print(json.dumps({**report, "losses": news}), file=answers, flush=True)
            order = orders.readline()
            if not order:
                os._exit(0)  # whatever the framework would do at the end
            left, began = int(order), (_cpu_seconds(), time.perf_counter())
        left -= 1
        yield batch


def products(job: Job) -> None:
    """In place of training: one matrix product a step, which is the peak that the figures are compared with."""
    a, b = (torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16 if job.bf16 else torch.float32) for _ in range(2))
    for _ in job.batches:
        a @ b


def work(name: str, size: Size, bf16: bool, compiled: bool, folder: Path) -> None:
    """Be a peer until the orders end. Its own output goes to stderr, since stdout has the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    losses: list[torch.Tensor] = []
    batches = obey(token_batches(size), losses, sys.stdin, answers)
    job = Job(llama(size), size.length, bf16, compiled, folder, batches, losses)
    (products if name == PEAK else PEERS[name])(job)


# In the process of the benchmark


class Peer:
    """The process of a peer.

    Args:
        name: of `PEERS`, or `PEAK`.
        folder: for what it writes, its output too.
    """

    def __init__(self, name: str, size_name: str, bf16: bool, compiled: bool, folder: Path) -> None:
        self.name, self.losses = name, list[float]()
        folder.mkdir()
        self.log = folder / "output.txt"
        paths = [str(REPOSITORY), *([str(LITGPT)] if name == "litgpt" else []), os.environ.get("PYTHONPATH", "")]
        arguments = [name, size_name, str(int(bf16)), str(int(compiled)), str(folder)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers", "--worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                # Compilers in the process itself: no pool of them that runs beside the others' steps.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            )

    def order(self, steps: int) -> None:
        """Let it run some steps."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            print(steps, file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """What its last order took; waits for it.

        Raises:
            RuntimeError: the process has ended; with the last line of its output.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise RuntimeError(said[-1][:300])
        answer: dict[str, Any] = json.loads(line)
        self.losses += answer.pop("losses")
        return answer

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def missing(name: str) -> str | None:
    """The package that a peer lacks here, if any."""
    package = NEEDS.get(name)
    if package is None or importlib.util.find_spec(package) or (package == "litgpt" and (LITGPT / package).exists()):
        return None
    return package


def install_litgpt() -> str | None:
    """Install litgpt into a folder that its process alone sees, with the torch that is here; what failed, if it did."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(LITGPT)]
    done = subprocess.run([*command, "litgpt", "psutil"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def summary(found: dict[str, list[dict[str, float]]], losses: dict[str, list[float]], size: Size) -> dict[str, Any]:
    """Figures of each peer from the seconds a step of each round, those of `PEAK` among them; and from their losses."""
    flops = size.rows * size.length * training_flops_per_token(llama(size), size.length, "causal")
    peak = [2 * PRODUCT**3 / step["cpu"] for step in found[PEAK]]
    figures: dict[str, Any] = {}
    for name in (name for name in found if name != PEAK):
        cpu = [step["cpu"] for step in found[name]]
        figures[name] = {
            "cpu_ms": [round(1000 * seconds, 2) for seconds in cpu],
            "wall_ms": [round(1000 * step["wall"], 2) for step in found[name]],
            "cpu_ratio": ratios(cpu, [step["cpu"] for step in found[BASE]]),
            "share_of_peak": ratios([flops / seconds for seconds in cpu], peak),
            "losses": losses[name][:COMPARED],
            "loss_deviation": max(abs(a - b) for a, b in zip(losses[name][:COMPARED], losses[BASE], strict=False)),
        }
    return {"flops_per_step": flops, "peak_gflops": [round(rate / 1e9, 2) for rate in peak], "peers": figures}


def measure(
    size_name: str, names: Sequence[str], bf16: bool, compiled: bool, rounds: int, steps: int, warmup: int
) -> dict[str, Any]:
    """All peers of one size and way of running; one that fails is left out, and named in `failed`."""
    size, failed = SIZES[size_name], {}
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        peers = {name: Peer(name, size_name, bf16, compiled, Path(folder) / name) for name in (*names, PEAK)}
        try:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
            for peer in peers.values():
                peer.order(warmup)
            for name, peer in list(peers.items()):
                try:
                    peer.answer()  # that it has been built
                    peer.answer()
                except RuntimeError as error:
                    failed[name] = str(error)
                    peer.end()
                    del peers[name], found[name]
                    print(f"{name}: failed: {error}", flush=True)
            if gone := {BASE, PEAK} & failed.keys():
                raise SystemExit(f"{gone.pop()} failed, with which the others are compared")
            order = list(peers)
            for number in range(rounds):
                for name in order[number % len(order) :] + order[: number % len(order)]:
                    peers[name].order(steps)
                    answer = peers[name].answer()
                    found[name].append({key: seconds / steps for key, seconds in answer.items()})
                print(f"{size_name}: round {number + 1} of {rounds} done", flush=True)
            losses = {name: peer.losses for name, peer in peers.items()}
        finally:
            for peer in peers.values():
                peer.end()
    return {
        "size": size_name, "rows": size.rows, "length": size.length, "shape": size.shape, "bf16": bf16,
        "compiled": compiled, "rounds": rounds, "steps": steps, "warmup": warmup, "failed": failed,
        "load_average": [load, os.getloadavg()], **summary(found, losses, size),
    }  # fmt: skip


def title(run: dict[str, Any]) -> str:
    """A run in words, such as `5M, fp32, eager`."""
    return f"{run['size']}, {'bf16' if run['bf16'] else 'fp32'}, {'compiled' if run['compiled'] else 'eager'}"


def table(run: dict[str, Any]) -> str:
    """One run as Markdown: medians, and in brackets the extremes over the rounds."""
    lines = [
        f"| {title(run)} | CPU ms/step | wall ms/step | CPU / {BASE} | share of peak | loss differs by |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, row in run["peers"].items():
        cpu, wall = statistics.median(row["cpu_ms"]), statistics.median(row["wall_ms"])
        ratio = "{median:.3f} ({min:.3f} to {max:.3f})".format(**row["cpu_ratio"])
        lines.append(
            f"| `{name}` | {cpu:.0f} | {wall:.0f} | {ratio} | {row['share_of_peak']['median']:.2f} "
            f"| {row['loss_deviation']:.0e} |"
        )
    return "\n".join(lines)


def cpu_flags() -> list[str]:
    """The instructions of this CPU that matter to matrix products."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return []
    return sorted(word for word in words if word.startswith(("avx", "amx", "fma", "asimd", "sve", "bf16")))


def versions() -> dict[str, str]:
    """Of the packages of the peers, beyond those that `machine` tells."""
    from importlib.metadata import distributions

    wanted = {"transformers", "accelerate", "litgpt"}
    paths = [*sys.path, str(LITGPT)]
    return {one.name: one.version for one in distributions(path=paths) if one.name in wanted}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", help=f"of {', '.join(PEERS)}; default all; {BASE} is always among them")
    parser.add_argument("--sizes", default="5M", help=f"of {','.join(SIZES)}; default %(default)s")
    parser.add_argument("--formats", default="fp32,bf16", help="default %(default)s; bf16 where it is not emulated")
    parser.add_argument("--modes", default="eager,compiled", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=LOG_EVERY, help="of a peer in a round; default %(default)s")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the first round; default %(default)s")
    parser.add_argument("--install_litgpt", action="store_true", help=f"install litgpt into {LITGPT} first")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/peers-DATE-cpu.json; runs are added to it")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        name, size, bf16, compiled, folder = options.worker
        work(name, SIZES[size], bf16 == "1", compiled == "1", Path(folder))
        return
    given = {"sizes": SIZES, "formats": ("fp32", "bf16"), "modes": ("eager", "compiled")}
    chosen = {option: getattr(options, option).split(",") for option in given}
    for option, known in [*given.items(), ("peers", PEERS)]:
        for word in chosen.get(option, options.peers):
            if word not in known:
                parser.error(f"{option}: unknown {word}: give some of {', '.join(known)}")
    if min(options.rounds, options.steps, options.warmup) < 1:
        parser.error("--rounds, --steps and --warmup: give at least 1")
    if options.install_litgpt and (error := install_litgpt()):
        print(f"litgpt: pip could not install it: {error}")
    names, skipped = [], {}
    for name in [name for name in PEERS if name == BASE or not options.peers or name in options.peers]:
        if package := missing(name):
            skipped[name] = f"{package} is not installed"
        else:
            names.append(name)
    if "bf16" in chosen["formats"] and (ratio := bf16_time_ratio(1)) > SLOW_BF16:
        chosen["formats"].remove("bf16")
        skipped["bf16"] = f"bf16 products take {ratio:.1f} times as long as in fp32 on this CPU"
    for what, why in skipped.items():
        print(f"{what}: skipped: {why}")
    out = options.out or REPOSITORY / f"benchmarks/results/peers-{machine.today()}-cpu.json"
    described = machine.describe()
    described["versions"] |= versions()
    described["cpu_flags"] = cpu_flags()
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.exists() else []
    training = {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "clip": CLIP, "log_every_n_steps": LOG_EVERY}
    result = {"benchmark": "peers", "machine": described, "threads": 1, **training, "skipped": skipped, "runs": runs}
    for size, form, mode in itertools.product(*(chosen[key] for key in given)):
        run = measure(size, names, form == "bf16", mode == "compiled", options.rounds, options.steps, options.warmup)
        runs[:] = [other for other in runs if title(other) != title(run)] + [run]
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\n{table(run)}\n", flush=True)
    print(out)


if __name__ == "__main__":
    main()
