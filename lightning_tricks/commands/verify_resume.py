"""`verify-resume`: whether a run that is killed and resumed trains as if nothing had happened. Imports no torch.

Train straight, and again with kill -9 and a resume in the middle, each with RunLedger; then `ledger diff` of the two.
The function `verify_resume` does so for any module, the command for a recipe.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_json, check_json, write_json
from lightning_tricks.logs.ledger_diff import MEANINGS, LedgerDiff, compare, name_of
from lightning_tricks.logs.ledger_file import NAME as LEDGER
from lightning_tricks.logs.ledger_file import read_ledger

__all__ = ["ResumeReport", "verify_resume"]

CHECKPOINT = "half.ckpt"  # in the folder of the run that is killed
_PROCESS = "lightning_tricks.commands.resume_process"
DEFAULT_STEPS = 8
LEAST_STEPS = 4


@dataclass(frozen=True)
class Phase:
    """One of the three starts.

    Args:
        folder: of its run; that of the resume is that of the killed one, whose ledger goes on.
        last_step: number of optimizer steps that the run has done at its end.
        kill: whether to save there, and to end by SIGKILL in the middle of the next step.
        ckpt_path: that it goes on from.
    """

    folder: str
    last_step: int
    kill: bool = False
    ckpt_path: str | None = None


@dataclass(frozen=True)
class ResumeReport:
    """The answer of `verify_resume`.

    Args:
        steps: done straight.
        before: done before the kill.
        world_size: number of processes.
        diff: of the ledgers of the two runs.
    """

    steps: int
    before: int
    world_size: int
    diff: LedgerDiff

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is equal to the bit."""
        return not self.diff.differs

    def __str__(self) -> str:
        """A line for each part, and the answer."""
        return "\n".join([*self.diff.part_lines(), *self._verdict()])

    def _verdict(self) -> list[str]:
        runs = f"{self.steps} steps straight and {self.before} + kill -9 + {self.steps - self.before}"
        runs += f" in {self.world_size} processes" if self.world_size > 1 else ""
        if self.equal:
            rest = "" if self.diff.all_equal else ", in what was compared"
            return [f"verify-resume: {runs} are bitwise equal{rest}"]
        step, (part, *_) = self.diff.first() or (0, ["weights"])
        where = f"{name_of(part)} {self.diff.parts[part].place}"
        if self.diff.first_weights == 0 or step < self.before:
            return [
                f"verify-resume: two starts of this run differ before any resume, first in {where}: give it a seed "
                "(seed_everything), and trainer.deterministic: true on a GPU"
            ]
        return [f"verify-resume: {runs} differ, first in {where}", f"  {MEANINGS[part]}"]


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
        return [sys.executable, "-P", "-m", _PROCESS, json.dumps(target | asdict(phase))]

    return compare_phases(command, steps)


def _target(make: Callable[..., Any]) -> dict[str, Any]:
    """How another process finds the function."""
    name, module = getattr(make, "__qualname__", "<"), sys.modules.get(getattr(make, "__module__", ""))
    file = getattr(module, "__file__", None) if module and module.__name__ == "__main__" else None
    if "<" in name or module is None or (module.__name__ == "__main__" and file is None):
        raise UsageError(f"verify_resume: make={make!r}: give a function at the top level of a module or script")
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
        straight, killed = (str(Path(place, name)) for name in ("straight", "killed"))
        for folder in (straight, killed):
            os.mkdir(folder)
        checkpoint = os.path.join(killed, CHECKPOINT)
        _run(command, Phase(straight, steps), "the run")
        _run(command, Phase(killed, before, kill=True), "the run")
        shutil.rmtree(os.path.join(killed, "log"), ignore_errors=True)
        _run(command, Phase(killed, steps, ckpt_path=checkpoint), "the resume")
        one, other = read_ledger(straight), read_ledger(killed)
        return ResumeReport(steps, before, one.starts[0]["processes"], compare(one, other))


def _run(command: Callable[[Phase], list[str]], phase: Phase, what: str) -> None:
    """Run one phase to its end, and end all of its processes.

    Raises:
        UsageError: it did not end as it should, with the last line that it wrote.
    """
    from lightning_tricks._trainer.lightning import BACKEND  # here, as it loads torch

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
        said = last_error(output)
    done = 0
    with contextlib.suppress(UsageError):  # without any step
        done = max(read_ledger(phase.folder).steps) + 1
    if not done or code != (-signal.SIGKILL if phase.kill else 0):
        raise UsageError(f"verify-resume: {what} failed with exit code {code}: {said}")
    if done < phase.last_step:
        remedy = f"give --steps {done} or fewer" if done >= LEAST_STEPS else "lengthen it by --trainer.max_steps"
        asked = f"{phase.last_step} were asked for"
        raise UsageError(f"verify-resume: the run ended after {done} steps, and {asked}: {remedy}")


def last_error(output: Iterable[str]) -> str:
    """The last line of a process's output that tells an error, or its last line."""
    said = [line.strip() for line in output if line.strip()]
    last = next((line for line in reversed(said) if "rror" in line), said[-1] if said else "it wrote nothing")
    return last.removeprefix("error: ")


def program() -> list[str]:
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
        "verify-resume",
        description="Train a recipe for N steps, and again with kill -9 and a resume in the middle, in processes of "
        "their own and in a temporary folder; compare samples, batches, random states, loss, optimizer state and "
        "weights of each step bitwise. Other options are those of fit.",
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps; default %(default)s")
    add_json(parser)
    options, recipe = parser.parse_known_args(args)
    if not recipe:
        raise UsageError("verify-resume: give a recipe with --config RECIPE.yaml")

    def command(phase: Phase) -> list[str]:
        file = Path(phase.folder, "verify.json")  # JSON is YAML
        file.write_text(json.dumps(_settings(phase)), encoding="utf-8")
        return [*program(), "fit", *recipe, "--config", str(file)]

    with check_json("verify-resume", options.json):
        report = compare_phases(command, options.steps)
        print(report)
    runs = {"steps": report.steps, "steps_before_kill": report.before, "processes": report.world_size}
    write_json(options.json, {"equal": report.equal, **runs, **report.diff.record()})
    sys.exit(0 if report.equal else 1)


def _settings(phase: Phase) -> dict[str, Any]:
    """The settings that a phase lays over the recipe."""
    ledger = {"class_path": "RunLedger", "init_args": ledger_options(phase)}
    of_end = {name: value for name, value in asdict(phase).items() if name != "ckpt_path"}
    end = {"class_path": f"{_PROCESS}.EndOfPhase", "init_args": of_end}
    logger = {"class_path": "ResumingCSVLogger", "init_args": {"save_dir": phase.folder, "name": "log"}}
    trainer = {"logger": logger, "default_root_dir": phase.folder, "log_every_n_steps": 1}
    start = {"ckpt_path": phase.ckpt_path, "init_from": None} if phase.ckpt_path else {"ckpt_path": "none"}
    return {**start, "trainer": {**trainer, "callbacks+": [ledger, end]}}


def ledger_options(phase: Phase) -> dict[str, Any]:
    """Those of RunLedger, which sums all of the state in each step."""
    return {"path": os.path.join(phase.folder, LEDGER), "cover_weights_in_steps": 1}
