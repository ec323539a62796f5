"""`verify-resume`: whether a run that is killed and resumed trains as if nothing had happened. Imports no torch.

Train straight, and again with kill -9 and a resume in the middle, and name the first thing that differs. The function
`verify_resume` does so for any module, the command for a recipe.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.compare_records import Difference, Record, first_differences

# In the order of cause and effect within a micro-batch, so that the first one that differs is the cause of the others.
PARTS = ("data", "random state", "weights", "optimizer state", "scaler", "lr", "loss", "gradient norm")
CHECKPOINT = "half.ckpt"  # in the folder of the run that is killed
_RECORDER = "lightning_tricks.commands.resume_recorder"
DEFAULT_STEPS = 8
LEAST_STEPS = 4


@dataclass(frozen=True)
class Phase:
    """One of the three runs: the settings of its recorder, and the checkpoint that it goes on from."""

    folder: str
    steps: int
    first_step: int = 0
    kill: bool = False
    ckpt_path: str | None = None

    def recorder(self) -> dict[str, Any]:
        """The arguments of ResumeRecorder."""
        return {name: value for name, value in asdict(self).items() if name != "ckpt_path"}


@dataclass(frozen=True)
class ResumeReport:
    """The answer of `verify_resume`.

    Args:
        steps: done straight.
        before: done before the kill.
        world_size: number of processes.
        differences: the first one of each part that differs, the first of all first.
    """

    steps: int
    before: int
    world_size: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether everything is equal to the bit."""
        return not self.differences

    def __str__(self) -> str:
        """A line for each part, and one for all."""
        found = {difference.part: difference for difference in self.differences}
        lines = [f"{part}: " + (f"differs first {found[part].place}" if part in found else "equal") for part in PARTS]
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        runs = f"{self.steps} steps straight and {self.before} + kill -9 + {self.steps - self.before}"
        runs += f" in {self.world_size} processes" if self.world_size > 1 else ""
        if self.equal:
            return f"verify-resume: {runs} are equal to the bit"
        first = self.differences[0]
        where = f"{first}, on rank {first.rank}" if self.world_size > 1 else str(first)
        if first.step <= self.before:
            return (
                f"verify-resume: two starts of this run differ before any resume, first in {where}: give it a seed "
                "(seed_everything), and trainer.deterministic: true on a GPU"
            )
        return f"verify-resume: {runs} differ, first in {where}"


def verify_resume(make: Callable[[], tuple[Any, Any, dict[str, Any]]], steps: int = DEFAULT_STEPS) -> ResumeReport:
    """Train straight, and again with kill -9 and a resume in the middle, and compare the two to the bit.

    Works on any LightningModule and any data, in one process or in those that the Trainer starts. Each run is a process
    of its own, seeded with 0 before `make` is called; nothing is written but to a temporary folder.

    Args:
        make: a function at the top of a module or script; returns a LightningModule, its training data (a loader or a
            LightningDataModule), and the arguments of the Trainer, of which `logger` is replaced.
        steps: optimizer steps, at least 4; half of them come after the resume. Lost moments of an optimizer change
            weights only at the second one.

    Returns:
        What differs; `print` shows a line for each part.

    Raises:
        UsageError: `make` cannot be called in another process; `steps` is below 4, or more than the run has; the run
            fails.
    """
    target = _target(make)

    def command(phase: Phase) -> list[str]:
        return [sys.executable, "-P", "-m", _RECORDER, json.dumps(target | asdict(phase))]

    return compare_phases(command, steps)


def _target(make: Callable[..., Any]) -> dict[str, Any]:
    """How another process finds the function."""
    name, module = getattr(make, "__qualname__", "<"), sys.modules.get(getattr(make, "__module__", ""))
    file = getattr(module, "__file__", None) if module and module.__name__ == "__main__" else None
    if "<" in name or module is None or (module.__name__ == "__main__" and file is None):
        raise UsageError(f"verify_resume: make={make!r}: give a function that stands at the top of a module or script")
    return {"module": module.__name__, "file": file, "name": name, "sys_path": sys.path}


def compare_phases(command: Callable[[Phase], list[str]], steps: int) -> ResumeReport:
    """Run the three phases, each by the command line that `command` gives for it, and compare them.

    Raises:
        UsageError: see `verify_resume`.
    """
    if steps < LEAST_STEPS:
        raise UsageError(
            f"verify-resume: steps={steps}: give at least {LEAST_STEPS}, two before the resume and two after it"
        )
    if "LOCAL_RANK" in os.environ:
        raise UsageError("verify-resume starts the processes of a run itself: give the command without torchrun")
    before = steps // 2
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as place:
        folders = [Path(place, name) for name in ("straight", "killed", "resumed")]
        for folder in folders:
            folder.mkdir()
        straight, killed, resumed = map(str, folders)
        _run(command, Phase(straight, steps), "the run")
        _run(command, Phase(killed, before, kill=True), "the run")
        checkpoint = os.path.join(killed, CHECKPOINT)
        shutil.rmtree(os.path.join(killed, "log"), ignore_errors=True)
        _run(command, Phase(resumed, steps - before, first_step=before, ckpt_path=checkpoint), "the resume")
        names = sorted(path.name for path in folders[0].glob("rank_*.jsonl"))
        pairs: list[tuple[Record, Record]] = []
        for name in names:
            pairs += zip_longest(_read(straight, name), _read(killed, name) + _read(resumed, name), fillvalue={})
        found = first_differences(pairs, PARTS, judge)
    return ResumeReport(steps, before, len(names), tuple(found))


def _read(folder: str, name: str) -> list[Record]:
    return [json.loads(line) for line in Path(folder, name).read_text(encoding="utf-8").splitlines()]


def judge(part: str, one: Record, other: Record) -> str | None:
    """The first name within a part that differs, empty for one without names; None if the part is equal."""
    if not (one and other):  # windows of other lengths: the data were divided otherwise
        return "another number of micro-batches" if part == "data" else None
    a, b = one.get(part), other.get(part)
    if a == b:
        return None
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return ""
    return next(name for name in [*a, *b] if a.get(name) != b.get(name))


def _run(command: Callable[[Phase], list[str]], phase: Phase, what: str) -> None:
    """Run one phase to its end, and end all of its processes.

    Raises:
        UsageError: it did not end as it should, with the last line that it wrote.
    """
    from lightning_tricks._lightning import BACKEND  # here, as it loads torch

    words = command(phase)
    environment = {**os.environ, "LIGHTNING_TRICKS_BACKEND": BACKEND}
    with Path(phase.folder, "output.txt").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that are still there
        output.seek(0)
        said = [line.strip() for line in output if line.strip()]
    if not Path(phase.folder, "rank_0.jsonl").exists() or code != (-signal.SIGKILL if phase.kill else 0):
        last = next((line for line in reversed(said) if "rror" in line), said[-1] if said else "it wrote nothing")
        raise UsageError(f"verify-resume: {what} failed with exit code {code}: {last.removeprefix('error: ')}")
    done = _read(phase.folder, "rank_0.jsonl")[-1]["step"]
    expected = phase.first_step + phase.steps
    if done < expected:
        remedy = f"give --steps {done} or fewer" if done >= LEAST_STEPS else "lengthen it by --trainer.max_steps"
        raise UsageError(f"verify-resume: the run ended after {done} steps, and {expected} were asked for: {remedy}")


def _program() -> list[str]:
    """The command line as this process has it: `python -m` looks into the current folder first, a script does not."""
    script = sys.argv[0]
    is_script = getattr(sys.modules["__main__"], "__spec__", None) is None and Path(script).name == "lightning-tricks"
    return [sys.executable, *["-P"] * sys.flags.safe_path, *([script] if is_script else ["-m", "lightning_tricks"])]


def run(args: list[str]) -> None:
    """Print a line for each part of a recipe's training, and exit with 1 if a resume changes one.

    Raises:
        UsageError: see `verify_resume`; no recipe.
    """
    parser = CommandParser(
        "lightning-tricks verify-resume",
        description="Train a recipe for N steps, and again with kill -9 and a resume in the middle, in processes of "
        "their own and in a temporary folder; compare data, random state, weights, optimizer state, scaler, lr, loss "
        "and gradient norm to the bit. Other options are those of fit.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps; default %(default)s")
    options, recipe = parser.parse_known_args(args)
    if not recipe:
        raise UsageError("verify-resume: give a recipe with --config RECIPE.yaml")

    def command(phase: Phase) -> list[str]:
        file = Path(phase.folder, "verify.json")  # JSON is YAML
        file.write_text(json.dumps(_settings(phase)), encoding="utf-8")
        return [*_program(), "fit", *recipe, "--config", str(file)]

    report = compare_phases(command, options.steps)
    print(report)
    sys.exit(0 if report.equal else 1)


def _settings(phase: Phase) -> dict[str, Any]:
    """The settings that a phase lays over the recipe."""
    recorder = {"class_path": f"{_RECORDER}.ResumeRecorder", "init_args": phase.recorder()}
    logger = {"class_path": "ResumingCSVLogger", "init_args": {"save_dir": phase.folder, "name": "log"}}
    trainer = {"logger": logger, "default_root_dir": phase.folder, "callbacks+": [recorder]}
    start = {"ckpt_path": phase.ckpt_path, "init_from": None} if phase.ckpt_path else {"ckpt_path": "none"}
    return {**start, "trainer": trainer}
