"""The file of a ledger, what `check` finds in it, and the first thing in which two of them differ."""

import pytest

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.ledger_diff import check, compare, compare_steps
from lightning_tricks.logs.ledger_file import LedgerFile, read_ledger


def lines_of(path, steps=3, start=1, weights="0", **others):
    """A ledger of one process that begins with `weights`; `steps` is a number of steps, or which ones."""
    file = LedgerFile(path)
    file.append([{"start": start, "processes": 1, "weights": weights}])
    values = {"samples": None, "batch": "1", "torch_random": "2", "other_random": "2", "loss": 0.5, "weights": "3"}
    steps = range(start, start + steps) if isinstance(steps, int) else steps
    file.append({"step": step, **values, **others} for step in steps)
    return path


def test_a_changed_or_lost_line_breaks_the_chain(tmp_path):
    path = lines_of(tmp_path / "ledger.jsonl", 5)
    lines = path.read_text().splitlines(keepends=True)
    assert read_ledger(path).broken == []
    for changed, broken in (
        ([*lines[:3], lines[3].replace("0.5", "0.25"), *lines[4:]], [4]),
        ([*lines[:2], *lines[3:]], [3]),
        ([lines[0], lines[2], lines[1], *lines[3:]], [2, 3, 4]),
        ([*lines[:2], "rubbish\n", *lines[3:]], [3, 4]),
        ([*lines[:2], lines[2].replace('"batch', "batch"), *lines[3:]], [3, 4]),
    ):
        path.write_text("".join(changed))
        assert read_ledger(path).broken == broken


@pytest.mark.parametrize("rest", [b'{"step": 4, "samp', b'{"step": 4}\n', b"\0\0\0\0", b"\xff\xfe\n"])
def test_an_unfinished_end_is_cut_off_by_the_next_start(tmp_path, rest):
    path = lines_of(tmp_path / "ledger.jsonl")
    with path.open("ab") as file:
        file.write(rest)
    assert list(read_ledger(path).steps) == [1, 2, 3]
    lines_of(path, 4, start=2)
    ledger = read_ledger(path)
    assert (list(ledger.steps), ledger.broken, ledger.unfinished) == ([1, 2, 3, 4, 5], [], False)
    assert [again["step"] for _, again in ledger.repeated] == [2, 3]
    path.write_bytes(b'{"star')  # killed in the very first write
    lines_of(path)
    assert read_ledger(path).broken == []


def test_a_check_says_what_a_kill_and_a_power_failure_have_left(tmp_path):
    ledger = read_ledger(lines_of(tmp_path / "a.jsonl", [1, 2, 5, 6]))
    missing = "steps 3 to 4 are missing: a power failure can take lines that a kill leaves"
    head = f"{tmp_path}/a.jsonl: steps 1 to 6, 1 process, started at step 1"
    assert check(ledger) == ([head], [missing])
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "samp')
    unfinished = "the last line is unfinished: the run was killed while it was written, or is writing it now"
    assert check(read_ledger(tmp_path / "a.jsonl")) == ([head, unfinished], [missing])


def test_other_first_weights_and_other_samples_are_the_first_difference(tmp_path):
    one = read_ledger(lines_of(tmp_path / "a.jsonl", samples=[[0, 7]]))
    other = read_ledger(lines_of(tmp_path / "b.jsonl", samples=[[0, 7]], weights="9"))
    found = compare(one, other, 0.01)
    assert found.differs
    assert list(found.lines())[-1] == "ledger diff: the first difference is in the weights with which step 1 begins"
    said = list(compare(one, read_ledger(lines_of(tmp_path / "c.jsonl", samples=[[8, 15]])), 0.01).lines())
    assert "samples: differs first at step 1 ([[0, 7]] and [[8, 15]])" in said
    assert said[-2] == "ledger diff: the first difference is at step 1, in samples"


def test_a_file_without_a_start_or_a_step_holds_no_ledger(tmp_path):
    start, *steps = lines_of(tmp_path / "ledger.jsonl").read_text().splitlines(keepends=True)
    for lines in ([start], steps, []):
        (tmp_path / "ledger.jsonl").write_text("".join(lines))
        with pytest.raises(
            UsageError, match=r"ledger\.jsonl: holds no step of a ledger: name the file that RunLedger "
        ):
            read_ledger(tmp_path)


def test_parts_are_compared_where_two_runs_can_be_equal():
    start = {"processes": 1, "data_ranks": 1, "micro_batches": 1, "strategy": "S", "parts": 1, "elements": 9}
    line = {"step": 1, "samples": None, "batch": "1", "torch_random": "2", "other_random": "3", "loss": 1.0}
    line |= {"optimizer": None, "weights": "4", "start": start}
    windows = {**line, "start": {**start, "micro_batches": 2}, "batch": "5", "loss": 1.001}
    parts = compare_steps([(line, windows)], 0.01)
    assert parts["batch"].not_compared == {"micro batches: 1 and 2": 1}
    assert parts["loss"].near == 1
    assert compare_steps([(line, windows)], 1e-4)["loss"].place == "at step 1 (1.0 and 1.001)"
    sharded = {**line, "start": {**start, "strategy": "T"}, "weights": "6"}
    parts = compare_steps([(line, sharded)], 0.01)
    assert (parts["batch"].equal, parts["weights"].not_compared) == (1, {"strategy: S and T": 1})
    nan = {**line, "loss": "nan"}
    assert compare_steps([(nan, nan)], 0.01)["loss"].equal == 1
    assert compare_steps([(nan, line)], 0.01)["loss"].differs == 1
    assert "optimizer" not in parts, "no line has it"
    moved = {**line, "optimizer": "7"}
    assert compare_steps([(moved, {**line, "optimizer": "8"})], 0.01)["optimizer"].differs == 1
    assert compare_steps([(moved, line)], 0.01)["optimizer"].not_compared == {"not recorded in both": 1}


def test_the_command_prints_the_difference_and_exits_by_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = lines_of(tmp_path / "a.jsonl").read_text()
    lines_of(tmp_path / "b.jsonl")
    (tmp_path / "d.jsonl").write_text(text.replace("0.5", "0.25"))

    def run(*words):
        with pytest.raises(SystemExit) as end:
            door.run(["ledger", *words])
        return end.value.code, capsys.readouterr().out

    code, said = run("diff", "a.jsonl", "b.jsonl")
    assert (code, said.splitlines()[-1]) == (0, "ledger diff: no difference in what was compared")
    code, said = run("diff", "a.jsonl", "d.jsonl")
    assert code == 1
    assert "B: line 2 does not follow" in said
    assert "ledger diff: the first difference is at step 1, in loss" in said
    assert "loss: differs first at step 1 (0.5 and 0.25)" in said
    assert (run("check", "a.jsonl")[0], run("check", "d.jsonl")[0]) == (0, 1)
