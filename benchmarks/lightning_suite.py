"""Run Lightning's own tests with our parts in every Trainer, and compare each test and the end of each fit.

`python -m benchmarks.lightning_suite CHECKOUT` takes hours of one core; CHECKOUT is Lightning's repository at the
installed version. An interrupted run goes on: each mode has a file of lines in --folder, two for each test.
docs/compatibility.md shows the result.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.lightning_reasons import REASONS
from benchmarks.stage_file import write

ROOT = Path(__file__).resolve().parent.parent
PLAIN, AGAIN = "plain", "plain_again"  # Lightning alone; and once more the tests that differ in a mode
MODES = (
    "monitors", "StepGuard", "SpikeRollback", "EMA", "TailAverage", "ExactResume", "Preemption", "HangWatchdog",
    "GCControl", "BatchSizeWarmup", "SafeCheckpoint", "precision", "BF16Mixed", "GradientClippingMixin",
)  # fmt: skip
COUNTS_USES = ("SafeCheckpoint", "precision", "BF16Mixed", "GradientClippingMixin")  # in the place of something
PARTS = ("weights", "optimizers", "random", "steps", "metrics")
# Parts that are other ones on purpose: bf16 in fp32's place; the random numbers of loaders that ExactResume sets.
OTHER: Mapping[str, Sequence[str]] = {"BF16Mixed": PARTS, "ExactResume": ("random",)}
TESTS = "tests/tests_pytorch"
Results = Mapping[str, Mapping[str, Any]]  # of each test
_POLL_SECONDS = 0.2
_ERROR_CHARACTERS = 240


# ------------------------------------------------------------------------------------------------ running a mode


def read(*files: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The last result of each test, and the tests that were started and have no result since."""
    done: dict[str, dict[str, Any]] = {}
    started: list[str] = []
    for text in [text for file in files if file.exists() for text in file.read_text(encoding="utf-8").splitlines()]:
        try:
            line = json.loads(text)
        except ValueError:  # the process was killed while it wrote this line
            continue
        if "start" in line:
            started.append(line["start"])
        elif "test" in line:
            done[line["test"]] = line
            started = [test for test in started if test != line["test"]]
    return done, started


def write_lines(lines: Path, *rows: Mapping[str, Any]) -> None:
    """Append rows to a mode's file."""
    with lines.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def start_pytest(checkout: Path, mode: str, lines: Path, tests: Path | None, files: Iterable[str]) -> Any:
    """Start pytest with our plugin on some files; without `tests`, it writes what tests there are into `lines`."""
    environment = os.environ | {
        "LIGHTNING_SUITE_MODE": mode,
        "LIGHTNING_SUITE_LINES": str(lines.resolve()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(checkout / "tests")]),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",  # some tests go through a set of paths
        "CUDA_VISIBLE_DEVICES": "",
    }
    if tests:
        environment["LIGHTNING_SUITE_ONLY"] = str(tests.resolve())
    plugins = ["-p", "benchmarks.lightning_plugin", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
    options = ["-q", "--color=no", "--continue-on-collection-errors", *([] if tests else ["--collect-only"])]
    command = [sys.executable, "-m", "pytest", *plugins, *options, *(str(checkout / file) for file in files)]
    with lines.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=checkout / "tests", env=environment, stdout=log, stderr=log, start_new_session=True
        )


def wait(process: Any, lines: Path, limit: float) -> str:
    """Until the process ends: "" or why it did not end well. Stopped if it writes no line for `limit` seconds."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        now = lines.stat().st_size if lines.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > limit:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stood still for {limit:.0f} s"
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}"
    return "" if process.returncode in (0, 1, 5) else f"ended with exit code {process.returncode}"


def collect(checkout: Path, folder: Path, limit: float) -> list[str]:
    """The names of all tests of the checkout; kept in the folder."""
    names = folder / "tests.json"
    if not names.exists():
        wait(start_pytest(checkout, PLAIN, names, None, [TESTS]), names, limit)
    if not names.exists():
        raise SystemExit(f"pytest found no tests in {checkout / TESTS}: see {names.with_suffix('.log')}")
    return list(json.loads(names.read_text(encoding="utf-8")))


def is_done(lines: Path, tests: Iterable[str]) -> list[bool]:
    """Which tests have a result."""
    done = read(lines)[0]
    return [test in done for test in tests]


def run_tests(checkout: Path, mode: str, lines: Path, tests: Sequence[str], limit: float) -> None:
    """Run the tests that have no result in `lines` yet. One in which the process dies costs that test alone."""
    if not all(is_done(lines, tests)):
        write_lines(lines, {"commit": machine.commit(ROOT), "date": machine.today(), "mode": mode})
    while left := [test for test, done in zip(tests, is_done(lines, tests), strict=True) if not done]:
        with tempfile.TemporaryDirectory() as folder:
            only = Path(folder) / "only.json"
            only.write_text(json.dumps(left), encoding="utf-8")
            files = dict.fromkeys(test.partition("::")[0] for test in left)
            trouble = wait(start_pytest(checkout, mode, lines, only, files), lines, limit)
        done, started = read(lines)
        if not trouble:
            write_lines(lines, *({"test": test, "outcome": "not found"} for test in left if test not in done))
        elif started:
            write_lines(lines, {"test": started[-1], "outcome": "crashed", "error": trouble})
        elif not any(test in done for test in left):
            raise SystemExit(f"{mode}: pytest {trouble} before its first test: see {lines.with_suffix('.log')}")


# ------------------------------------------------------------------------------------------------- comparing modes


def same_twice(plain: Results, again: Results) -> tuple[Results, list[str]]:
    """Tests that make a Trainer and pass with Lightning alone; names of those that are not the same a second time."""
    base, changed = {}, []
    for test, result in plain.items():
        if result["outcome"] != "passed" or not result.get("trainers"):
            continue
        if test in again and again[test]["outcome"] != "passed":
            changed.append(test)
            continue
        base[test] = again.get(test, result)
        if test in again and fits_that_differ(result, again[test])[1]:
            base[test] = {**result, "fits": []}  # its outcome says something, its numbers do not
            changed.append(test)
    return base, changed


def fits_that_differ(
    plain: Mapping[str, Any], now: Mapping[str, Any], but: Sequence[str] = ()
) -> tuple[int, list[list[str]]]:
    """How many ends were compared, and the parts that differ of each that does. New metrics are no difference.

    Args:
        plain: the result of a test with Lightning alone.
        now: that of a mode.
        but: parts that are not compared.
    """
    before, after = plain.get("fits", []), now.get("fits", [])
    if len(before) != len(after):
        return len(before), [["number of runs"]] if before else []
    found = []
    for old, new in zip(before, after, strict=True):
        kept = {**new, "metrics": {name: new["metrics"].get(name) for name in old["metrics"]}}
        if parts := [part for part in PARTS if part not in but and old[part] != kept[part]]:
            found.append(parts)
    return len(before), found


def compare(mode: str, base: Results, now: Results) -> dict[str, Any]:
    """What a mode's results say beside those of Lightning alone: counts, and each test that differs with its reason."""
    rows: list[dict[str, Any]] = []
    run = passed = ends = equal = used = 0
    for test, result in now.items():
        not_used = mode in COUNTS_USES and not result.get("used")
        if test not in base or not_used or result["outcome"] == "skipped":
            continue
        run, used = run + 1, used + result.get("used", 0)
        row = {"test": test.removeprefix(TESTS + "/")}
        if result["outcome"] != "passed":
            error = readable(result.get("error", ""))
            kind = "refused" if "UsageError: " in error else "crashed" if result["outcome"] == "crashed" else "failed"
            row |= {"kind": kind, "error": error, "at": " ".join(result.get("at", [])[-1:])}
        else:
            passed += 1
            compared, different = fits_that_differ(base[test], result, OTHER.get(mode, ()))
            ends, equal = ends + compared, equal + compared - len(different)
            if not different:
                continue
            row |= {"kind": "differs", "error": "; ".join(sorted({", ".join(parts) for parts in different}))}
        rows.append({**row, "reason": reason(mode, row)})
    return {
        "tests": run, "passed": passed, "ends": ends, "equal": equal, **({"used": used} if mode in COUNTS_USES else {}),
        "differences": sorted(rows, key=lambda row: (row["kind"], str(row["reason"]), row["test"])),
    }  # fmt: skip


def readable(error: str) -> str:
    """An error without colours, addresses and the folders of one machine, cut."""
    for pattern, by in (
        (r"\x1b(\[[\d;]*m?)?", ""),
        (r" at 0x\w+", ""),
        (r"(?<![\w.])/[\w./-]*/(?=[\w.=-])", ".../"),
        (r"\s+", " "),
    ):
        error = re.sub(pattern, by, error)
    return error[:_ERROR_CHARACTERS]


def reason(mode: str, row: Mapping[str, str]) -> str | None:
    """The first reason of `lightning_reasons.py` that fits; a refusal is its own line; None: not explained."""
    for modes, test, error, why in REASONS:
        if re.fullmatch(modes, mode) and re.search(test, row["test"]) and re.search(error, row["error"]):
            return why
    return None


def selected(mode: str, base: Results, longest: float = math.inf) -> list[str]:
    """The tests that a mode can change: those that train, and for what acts elsewhere too, all that make a Trainer."""
    if mode in ("monitors", "SafeCheckpoint"):
        return list(base)
    ends = {test: result.get("fits", []) for test, result in base.items() if result.get("seconds", 0) <= longest}
    if mode == "precision":
        names = ("MixedPrecision", "HalfPrecision")
        return [test for test, found in ends.items() if any(end.get("precision") in names for end in found)]
    return [test for test, found in ends.items() if any(end["of"] == "fit" for end in found)]


# --------------------------------------------------------------------------------------------------------- the table


def row_of(mode: str, found: Mapping[str, Any]) -> list[str]:
    """A mode's row of the table."""
    rows = found["differences"]
    explained = Counter(row["kind"] for row in rows if row["reason"])
    counts = [found["tests"], found["passed"], explained["refused"], explained["failed"], explained["differs"]]
    counts.append(sum(not row["reason"] for row in rows))
    but = OTHER.get(mode, ())
    bits = "not compared" if but == PARTS else f"{found['equal']} of {found['ends']}"
    bits += f", {' and '.join(but)} not compared" if but and but != PARTS else ""
    return [f"`{mode}`", *map(str, counts), bits, ", ".join(found["commit"])]


def table(modes: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row for each mode."""
    head = ["in each Trainer", "tests", "pass", "refused", "fail for a reason", "other numbers for a reason"]
    lines = [[*head, "not explained", "runs bitwise equal", "commit"], ["---"] * 9]
    return markdown([*lines, *(row_of(*item) for item in modes.items())])


def reasons(modes: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: how many tests have each reason."""
    counted: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for mode, found in modes.items():
        for row in found["differences"]:
            counted[row["kind"], str(row["reason"])][mode] += 1
    lines = [["kind", "reason", "tests"], ["---"] * 3]
    for (kind, why), tests in sorted(counted.items()):
        lines.append([kind, why, ", ".join(f"`{mode}` {n}" for mode, n in tests.items())])
    return markdown(lines)


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table of cells."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page_text(result: Mapping[str, Any]) -> str:
    """The part of docs/compatibility.md that figures make."""
    plain, versions = result["plain"], result["machine"]["versions"]
    outcomes = plain["outcomes"]
    return (
        f"{table(result['modes'])}\n\nLightning alone passes {outcomes['passed']:,} tests here, skips "
        f"{outcomes['skipped']:,} (GPUs, several processes, packages that are not installed) and fails "
        f"{outcomes['failed']:,}; {plain['compared']:,} of those that pass make a Trainer. "
        f"Tests of Lightning {result['lightning_tests']}, run with {versions['lightning']} and torch "
        f"{versions['torch']} on {result['machine']['cpu']}, {' and '.join(plain['date'])}.\n\n"
        f"{reasons(result['modes'])}"
    )


def result_of(checkout: Path, folder: Path, modes: Iterable[str]) -> dict[str, Any]:
    """Everything that was measured, ready for JSON."""
    plain, again = (read(folder / f"{mode}.jsonl")[0] for mode in (PLAIN, AGAIN))
    base, changed = same_twice(plain, again)
    found = {}
    for mode in modes:
        files = folder / f"{mode}.jsonl", folder / f"{mode}-again.jsonl"
        if files[0].exists():
            compared = compare(mode, base, read(*files)[0])
            rows = [brief(row) if row["reason"] else row for row in compared["differences"]]
            found[mode] = {**origin(*files), **compared, "differences": rows}
    outcomes = Counter(result["outcome"] for result in plain.values())
    return {
        "machine": machine.describe(),
        "lightning_tests": (checkout / "src/version.info").read_text(encoding="utf-8").strip(),
        "plain": {**origin(folder / f"{PLAIN}.jsonl"), "outcomes": dict(outcomes), "compared": len(base)},
        "not_the_same_twice": [test.removeprefix(TESTS + "/") for test in changed],
        "modes": found,
    }


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """A difference whose reason says enough."""
    return {key: row[key] for key in ("test", "kind", "reason")}


def origin(*files: Path) -> dict[str, Any]:
    """Commits and dates of a mode's lines, the oldest first."""
    texts = [text for file in files if file.exists() for text in file.read_text(encoding="utf-8").splitlines()]
    heads = [json.loads(text) for text in texts if text.startswith('{"commit"')]
    return {key: list(dict.fromkeys(head[key] for head in heads)) for key in ("commit", "date")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lightning_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="Lightning's repository at the installed version")
    parser.add_argument("modes", nargs="*", metavar="mode", help=f"of {', '.join(MODES)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path("lightning-suite"), help="for the lines of each mode")
    parser.add_argument("--only", default="", help="tests whose name has this in it")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds in which a test must end")
    parser.add_argument("--longest", type=float, default=math.inf, help="leave slower tests out of all but two modes")
    parser.add_argument("--out", type=Path, help="JSON file; default: none")
    options = parser.parse_args(arguments)
    if unknown := [mode for mode in options.modes if mode not in MODES]:
        parser.exit(2, f"unknown mode {', '.join(unknown)}: give some of {', '.join(MODES)}\n")
    checkout, folder = options.checkout.resolve(), options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tests = [test for test in collect(checkout, folder, options.limit) if options.only in test]
    run_tests(checkout, PLAIN, folder / f"{PLAIN}.jsonl", tests, options.limit)
    base, _ = same_twice(read(folder / f"{PLAIN}.jsonl")[0], {})
    for mode in options.modes or MODES:
        lines = folder / f"{mode}.jsonl"
        run_tests(checkout, mode, lines, selected(mode, base, options.longest), options.limit)
        # once more, in a new process without the others, and without us: is it our doing?
        rows = compare(mode, base, read(lines)[0])["differences"]
        second = [f"{TESTS}/{row['test']}" for row in rows if row["kind"] != "crashed"]
        run_tests(checkout, mode, lines.with_name(f"{mode}-again.jsonl"), second, options.limit)
        run_tests(checkout, AGAIN, folder / f"{AGAIN}.jsonl", second, options.limit)
    result = result_of(checkout, folder, MODES)
    print(table(result["modes"]), reasons(result["modes"]), sep="\n\n")
    if options.out:
        write(options.out, result)
    rows = [(mode, row) for mode, found in result["modes"].items() for row in found["differences"]]
    left = [f"{mode}: {row['test']}: {row['error']}" for mode, row in rows if not row["reason"]]
    if left:
        print(f"\nNot explained:\n{chr(10).join(left)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
