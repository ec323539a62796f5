"""The commands on logs load nothing heavy, and refuse a wrong place or option in one line."""

import subprocess
import sys

import pytest
from made_logs import TABLE, run_in

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.ledger_file import LedgerFile


def ledger_in(file, first=0):
    LedgerFile(file).append([{"start": first}, {"step": first, "loss": 1.0}])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with everything that the words below name."""
    folder = tmp_path_factory.mktemp("logs")
    run_in(folder / "a", settings={"lr": 0.1})
    run_in(folder / "b", settings={"lr": 0.2})
    without = TABLE.replace("train/loss", "my loss")
    run_in(folder / "val", without)
    run_in(folder / "train", TABLE.replace("val/loss", "x"))
    run_in(folder / "mine", without.replace("val/loss", "my val"))
    run_in(folder / "acc", without.replace("val/loss", "acc"))
    for name in ("none", "x/one", "x/two"):
        run_in(folder / name, "step\n")
    for name in ("broken", "empty", "other"):
        (folder / name).mkdir()
    (folder / "broken" / "events.out.tfevents.1.a").write_bytes(b"x" * 40)
    (folder / "other" / "events.out.tfevents.1.a").write_bytes(b"the events of another tool, as text" * 3)
    (folder / "a.txt").write_text("text")
    ledger_in(folder / "a.jsonl")
    ledger_in(folder / "c.jsonl", 9)
    return folder


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("doctor {}/no", "no such folder"),
        ("doctor {}/empty", "there is no log in it"),
        ("doctor {}/broken", r"holds no scalars \(events.out.tfevents.1.a: no event file"),
        ("doctor {}/a --names los=train/loss", r"los=train/loss; did you mean loss\?"),
        ("doctor {}/a --names loss=train/los", r"did you mean train/loss\?: it was not logged"),
        ("doctor {}/a --names loss", "names=loss: give ROLE=NAME"),
        ("doctor {}/val", r"no training loss among my loss, val/loss: name it, such as --names 'loss=my loss'"),
        ("doctor {}/a --html {}", "this is a folder"),
        ("doctor {}/a --html -", "doctor: html=-: it is not written to standard output: name a file"),
        ("doctor {}/a --stderr {}/no.txt", r"stderr=.*no\.txt: No such file"),
        ("runs {}/empty", "there is no run below it"),
        ("runs {}/a --names val_los=x", r"val_los=x; did you mean val_loss\?"),
        ("runs {}/a --names val_loss", "runs: names=val_loss: give ROLE=NAME"),
        ("runs {} --sort step", r"sort=step; did you mean steps\?"),
        ("runs {} --json {}", "json=.*this is a folder"),
        ("compare {}/no", "compare: .*no: no such folder: give the folder in which a logger writes its runs"),
        ("compare {}/other", r"its log holds no scalars \(events.out.tfevents.1.a: no event file"),
        ("compare {}/x", "x: no run below it has a log: .*x/two: its log holds no scalars"),
        ("compare {}/a", "a: one run alone: name another, or a folder with several"),
        ("compare {}/a {}/a", "named twice: name another run"),
        ("compare {}/a {}/b/../a", "a is .*a, named twice"),
        ("compare {}/a {}/mine", "among my loss, my val: name it, such as --names 'val_loss=my val'"),
        ("compare {}/a {}/acc", "no validation loss or training loss among acc, my loss: name it, such as --names"),
        ("compare {}/val {}/train", "train logged train/loss and val val/loss: no metric in common"),
        ("compare {}/a {}/b --at flops", r"at=flops: not known of all runs \(MFUMonitor\): give one of"),
        ("compare {}/a {}/b --seed_noise 0", "seed_noise=0: give a number above 0"),
        ("compare {}/none {}/a {}/b", "none: its log holds no scalars"),
        ("verify-resume", "verify-resume: give a recipe with --config RECIPE.yaml"),
        ("verify-resume --config a.yaml --steps 3", "verify-resume: steps=3: give at least 4"),
        ("ledger diff {}/a.jsonl", "the following arguments are required: B; ledger --help"),
        ("ledger diff {}/a.jsonl {}/c.jsonl", "has steps 0 to 0 and .* steps 9 to 9: they have no step in common"),
        ("ledger check {}/nowhere", r"nowhere: no ledger can be read \(No such file or directory\)"),
        ("ledger diff a b --tolerance=nan", "tolerance=nan: give a relative"),
    ],
)  # fmt: skip
def test_a_wrong_place_or_option_is_one_line(made, words, line):
    with pytest.raises(UsageError, match=line) as refused:
        door.run(words.replace("{}", str(made)).split())
    assert "\n" not in str(refused.value)


HEAVY = {"torch", "lightning", "tensorboard", "google", "matplotlib", "pandas", "scipy"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("runs {}", {"numpy"}),
        ("ledger check {}/a.jsonl", {"numpy"}),
        ("doctor {}/a", set()),
        ("compare {}/a {}/b --seed_noise 1 --group runs --at last --json -", set()),
    ],
)
def test_nothing_heavy_is_loaded(made, words, more):
    """Their import takes longer than the half second of CPU time in which a command on short runs answers."""
    code = (
        "import sys\nfrom lightning_tricks.__main__ import run\n"
        f"try: run({words.replace('{}', str(made)).split()!r})\nexcept SystemExit: pass\n"
        f"print(sorted({HEAVY | more!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
