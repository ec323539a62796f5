"""Whatever lies in the folder of a run: runs, compare, doctor and ledger print what they can, and a line on the rest.

The junk is made by Hypothesis: wrong types, depth, cycles, sizes, encodings. What may be raised is a UsageError of one
line; a warning is an error here.
"""

import contextlib
import csv
import io
import json
import math
import os
import re
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_logs import TABLE, framed, losses, record, run_in, scalar
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands.answers import json_text
from lightning_tricks.commands.compare import page, text
from lightning_tricks.commands.compare import record as answer
from lightning_tricks.commands.doctor import Report
from lightning_tricks.commands.export.model_card import figures_of_run
from lightning_tricks.commands.runs import Table
from lightning_tricks.logs.compared_run import read_runs
from lightning_tricks.logs.comparison import compare_runs
from lightning_tricks.logs.ledger_diff import check, compare
from lightning_tricks.logs.ledger_file import LedgerFile, read_ledger
from lightning_tricks.logs.run import find_run, find_runs
from lightning_tricks.logs.run_log import read_log
from lightning_tricks.logs.symptoms import findings

CONFIG = {"seed_everything": 0, "trainer": {"max_steps": 40, "devices": 1}, "data": {"init_args": {"seq_len": 8}}}

numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, True, 10**400, -(10**19), 2**53, 2**63, math.nan, math.inf])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20))
names = st.one_of(st.text(max_size=10), st.integers(), st.none(), st.booleans())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=12,
)
raw = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=200).map(lambda words: words.encode("utf-8", "surrogatepass")),
    st.text(alphabet="-:[]{}&*!<>%|?,\"'#\n\t 01a~@`", max_size=200).map(str.encode),
)
junk = settings(max_examples=50, deadline=None)


def bad_run(folder, name="bad", log=TABLE, config=CONFIG, **files):
    """The folder of a run with a healthy log, and files of which each is bytes or text."""
    shutil.rmtree(Path(folder, name), ignore_errors=True)
    run = run_in(Path(folder, name), log, config)
    for file, content in files.items():
        content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        (run / FILES[file]).write_bytes(content)
    return run


FILES = {
    "settings": "config.yaml", "table": "metrics.csv", "events": "events.out.tfevents.1.a", "hparams": "hparams.yaml",
    "ledger": "ledger.jsonl",
}  # fmt: skip


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """Asks each command for a folder in which a run has bad files: another run is in every answer, of JSON's kinds."""
    folder = tmp_path_factory.mktemp("runs")
    bad_run(folder, "good", config={**CONFIG, "lr": 1})

    def ask(**files):
        bad = bad_run(folder, **files)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = find_runs(folder)
            good = next(run for run in found if run.name == "good")
            assert (good.steps, good.val_loss, good.unread) == (40, 2.05, ())
            for run in found:
                assert all("\n" not in line and len(line) < 400 for line in run.unread)
            table = Table(found).sorted_by("val_loss")
            assert "good" in table.text()
            json_text(table.records())
            assert find_run(folder).parent == folder
            with one_line():
                log, unread = read_log(bad)
                assert all("\n" not in line for line in unread)
                report = Report("bad", log, findings(log), unread)
                json_text([report.record(), report.text(), report.html()])
            with one_line():
                compared, lines = read_runs([str(folder / "good"), str(bad)], {})
                assert all("\n" not in line for line in lines)
                result = compare_runs(compared)
                json_text([answer(result, lines), text(result, lines), page(result, lines)])
            figures_of_run(bad / "checkpoints" / "last.ckpt", 10**6)

    return ask


@contextlib.contextmanager
def one_line():
    """A user's mistake is one line; anything else that is raised is a fault."""
    said = ""
    try:
        yield
    except UsageError as error:
        said = str(error)
    assert "\n" not in said


# ---- settings


def nested(depth):
    return "a: " + "[" * depth + "]" * depth + "\n"


BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24)
)


@junk
@given(content=raw)
@example(content=b"a: &a [*a]\n")
@example(content=BOMB.encode())
@example(content=nested(3000).encode())
@example(content=b"- " * 100_000)
@example(content=b"a: 1" + b":1" * 200_000)
@example(content=b"a: " + b"9" * 5000 + b"\nb: !!int x\nc: !!float ''\nd: !!bool y\ne: 2001-99-99\nf: !!timestamp z\n")
@example(content=b"a: !!binary '%'\nb: !!set {x, y}\nc: !!omap [a: 1]\nd: =\ne: !!null x\n? [1]\n: 2\n")
@example(content="a: é\n".encode("utf-16"))
@example(content=b"step,train/loss\n0,\x00\n" + b"\x00" * 200_000 + b"\n2,3.0\n")
@example(content=b'step,train/loss\n0,1.0\n1,"2.0\n' + b"2,3.0\n" * 40_000)
@example(content=b'"' + b"a" * 200_000 + b"\n")
def test_any_bytes_in_a_file_hide_no_run(beside, content):
    """As settings, as a table, as events; alone and behind a good beginning."""
    beside(settings=content)
    beside(hparams=content, config=None)
    beside(table=content, log=None)
    beside(table=b"step,train/loss\n" + content, log=None)
    beside(events=content)
    beside(events=recorded(40) + content, log=None)


@junk
@given(document=values)
@example(document={"trainer": [1]})
@example(document={"a": {"class_path": [None], "init_args": [1]}, "b": [{"class_path": 1, "init_args": 2}]})
@example(document={"betas": [math.nan, {"x": math.inf}]})
def test_values_of_any_type_as_settings_hide_no_run(beside, document):
    beside(settings=yaml.safe_dump(document))


@junk
@given(
    trainer=st.dictionaries(
        st.sampled_from(["devices", "num_nodes", "accumulate_grad_batches", "max_steps", "callbacks", "accelerator"]),
        values,
    ),
    strategy=values,
    sizes=st.tuples(numbers, numbers, values),
    elastic=values,
)
@example(trainer={"devices": 2}, strategy={"init_args": {"mesh": {"tensor": 0}}}, sizes=(4, 8, {}), elastic=None)
@example(trainer={"devices": 2, "num_nodes": "2"}, strategy=None, sizes=(4, 8, {}), elastic=None)
def test_values_of_any_type_where_tokens_are_counted_hide_no_run(beside, trainer, strategy, sizes, elastic):
    data = {"init_args": {"micro_batch_size": sizes[0], "seq_len": sizes[1], "seed": sizes[2]}}
    document = {"trainer": {**trainer, "strategy": strategy}, "data": data, "elastic": elastic}
    beside(settings=yaml.safe_dump(document))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("a: &a [*a]\n", "config.yaml: line 1: the alias *a: write its values out"),
        (nested(3000), "config.yaml: line 1: more than 50 lists or mappings in each other"),
        ("- 1\n", "config.yaml: no settings: it holds no mapping"),
        ("a: [\n", "config.yaml: no valid YAML: while parsing a flow node did not find expected node content line 2, "),
        ("a: 1\n" * 300_000, "config.yaml: larger than 1,048,576 bytes"),
    ],
)
def test_settings_that_cannot_be_read_are_a_line_and_the_run_has_its_figures(tmp_path, content, line):
    bad_run(tmp_path, settings=content)
    (run,) = find_runs(tmp_path)
    assert run.unread[0].startswith(line)
    assert (run.steps, run.val_loss, run.settings) == (40, pytest.approx(2.05), {})


def test_many_settings_that_differ_cost_as_many_lookups(tmp_path):
    """Each setting has a short name of its own: were all pairs compared, these would be 1.6e9."""
    bad_run(tmp_path, "a", settings="".join(f"k{i}: 1\n" for i in range(40_000)))
    bad_run(tmp_path, "b", settings="k0: 1\n")
    assert len(Table(find_runs(tmp_path)).settings) == 39_999


def test_pipes_folders_and_broken_links_in_place_of_files_are_a_line_each(tmp_path):
    """Whoever opened a pipe would wait for ever."""
    bad_run(tmp_path, "good")
    bad = bad_run(tmp_path, log=None, config=None)
    for name in ("config.yaml", "metrics.csv", "events.out.tfevents.1.a"):
        os.mkfifo(bad / name)
    os.mkfifo(bad / "ledger.jsonl")
    (bad / "hparams.yaml").mkdir()
    (bad / "events.out.tfevents.2.b").symlink_to(tmp_path / "nowhere")
    (bad / "events.out.tfevents.3.c").mkdir()
    (run, good) = find_runs(tmp_path)
    assert (good.steps, find_run(tmp_path).name) == (40, "good")
    assert run.unread == (
        "events.out.tfevents.1.a: no regular file",
        "events.out.tfevents.2.b: No such file or directory", "events.out.tfevents.3.c: no regular file",
        "metrics.csv: no regular file",
        "config.yaml: no regular file", "hparams.yaml: no regular file",
    )  # fmt: skip
    with pytest.raises(UsageError, match="its log holds no scalars"):
        read_log(bad)
    with pytest.raises(UsageError, match="no regular file"):
        read_ledger(bad)


# ---- metrics.csv


cells = st.one_of(
    st.sampled_from(["", "0", "1", "39", "1e3", "nan", "-inf", "1e308", "-1e308",
                     "1e999", "1e-320", "-5", "x", '"', "9" * 400]),
    st.floats().map(str),
    st.text(max_size=8),
)  # fmt: skip
heads = st.sampled_from(
    ["step", "train/loss", "val/loss", "epoch", "train/lr", "train/grad_norm", "val/bits_per_byte",
     "train/batch_tokens",
     "goodput/wall_seconds", "throughput/mfu", "throughput/tokens_per_second", "throughput/step_seconds",
     "throughput/model_flops_per_second", "throughput/tokens_per_second_per_device", "val/ema_share", "", "x"]
)  # fmt: skip


@junk
@given(header=st.lists(heads, max_size=6), rows=st.lists(st.lists(cells, max_size=7), max_size=12))
@example(header=["step", "val/loss", "train/batch_tokens"], rows=[["0", "1.0", "nan"], ["1e15", "2.0", "inf"]])
@example(header=["step", "val/loss"], rows=[["0", "1e308"], ["1", "-1e308"], ["2", "1e308"]])
@example(
    header=["step", "train/loss", "throughput/tokens_per_second", "throughput/step_seconds"],
    rows=[["0", "1.0", "5", "1"], ["9e15", "2.0", "6", "1"]],
)
def test_any_table_hides_no_run(beside, header, rows):
    """With a column of steps, as a logger counts them, or with any."""
    for steps in (False, True):
        table = csv.writer(file := io.StringIO())
        table.writerow(["step", *header] if steps else header)
        table.writerows([number, *row] if steps else row for number, row in enumerate(rows))
        beside(table=file.getvalue().encode("utf-8", "replace"), log=None)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_table_with_a_mark_of_its_encoding_has_its_scalars(tmp_path, encoding):
    """As Excel and PowerShell write them."""
    run = bad_run(tmp_path, table=TABLE.encode(encoding), log=None)
    assert (find_runs(tmp_path)[0].steps, len(read_log(run)[0]["loss"])) == (40, 40)


def test_rows_that_are_left_out_are_counted_in_one_line(tmp_path):
    """A cell without end takes up what follows it, up to the 131,072 characters that csv allows a cell."""
    tail = "".join(f"{step},3.0\n" for step in range(30_000))
    run = bad_run(tmp_path, table=f'step,val/loss\n0,1.0\n1,"2.0\n{tail}29999,0.5\n,4.0\n\n7,1,1\nx,1\n', log=None)
    (found,) = find_runs(tmp_path)
    assert found.best_val_loss == 0.5
    rows = "metrics.csv: 3 rows left out, without a step or with other columns than the header; the first: line "
    assert [
        line.startswith(rows) for line in (*found.unread, *read_log(run, {"val_loss": "val/loss"}, ("val_loss",))[1])
    ] == [True] * 2
    bad_run(tmp_path, "a", table="time;loss\n1;2\n", log=None)
    assert find_runs(tmp_path)[0].unread == ("metrics.csv: no column `step` in its first line: 'time;loss'",)


# ---- event files


def recorded(count):
    return b"".join(map(record, losses(range(count), lambda step: 5 - step / 20)))


int64 = st.one_of(st.integers(-3, 60), st.integers(-(2**63), 2**63 - 1))
tags = st.one_of(
    st.sampled_from(["train/loss", "val/loss", "goodput/wall_seconds", "train/batch_tokens",
                     "hp/x", "_hparams_/session_end_info", "é" * 80]),
    st.text(st.characters(codec="utf-8"), max_size=6),
)  # fmt: skip


events = st.one_of(
    st.builds(scalar, tags, int64, st.floats(width=32), st.floats()),
    st.builds(lambda step: Event(step=step, session_log=SessionLog(status=SessionLog.START)), int64),
    st.just(Event(file_version="brain.Event:2")),
)
records = st.one_of(
    events.map(record),
    st.builds(framed, st.binary(max_size=40)),
    st.builds(framed, st.binary(max_size=40), st.one_of(st.integers(0, 80), st.integers(0, 2**64 - 1))),
)


@junk
@given(parts=st.lists(records, max_size=12), cut=st.integers(0, 30))
@example(parts=[record(scalar("train/loss", 2**63 - 1, 1.0))], cut=0)
@example(parts=[record(scalar("train/loss", 3, math.nan, math.inf))] * 2, cut=0)
@example(parts=[framed(b""), framed(b"\x12")], cut=0)
@example(parts=[record(scalar("\n", 0, 0.0))], cut=0)
def test_any_records_hide_no_run(beside, parts, cut):
    content = b"".join(parts)
    beside(events=content[: len(content) - cut], log=None)
    beside(events=recorded(30) + content[: len(content) - cut], log=None)


@pytest.mark.parametrize("after", [framed(b"x", 2**63), bytes(4096), framed(b"x" * 50, 7)])
def test_an_event_file_is_read_up_to_its_damage_and_a_line_says_so(tmp_path, after):
    run = bad_run(tmp_path, log=None, events=recorded(40) + after + recorded(10))
    (found,), (log, unread) = find_runs(tmp_path), read_log(run)
    assert (found.steps, len(log["loss"])) == (40, 40)
    (line,) = found.unread
    assert re.match(r"events.out.tfevents.1.a: (1 record left out that hold no event; )?damaged at byte \d", line)
    assert unread == [line]


def test_many_tags_and_many_resumes_cost_as_many_looks(tmp_path):
    """Were each tag or resume held against each point, these would be 4e8 comparisons."""
    many = 20_000
    tags = b"".join(record(scalar(f"m{i:07d}", 1, 1.0)) for i in range(many))
    start = record(Event(step=10**6, session_log=SessionLog(status=SessionLog.START)))
    run = bad_run(tmp_path, log=None, events=recorded(40) + tags + start * many)
    assert len(read_log(run)[0].metrics) == many + 2  # and the speed
    points = b"".join(record(scalar("val/loss", step, 1.0)) for step in range(many))
    bad_run(tmp_path, "b", log=None, events=points + start * many)
    assert find_runs(tmp_path)[0].best_step == 1


# ---- ledgers


lines = st.lists(
    st.one_of(
        values.map(json.dumps),
        st.text(max_size=40),
        st.dictionaries(
            st.sampled_from(["start", "step", "processes", "weights", "loss", "batch", "samples", "torch_random",
                             "run", "saves"]),
            st.one_of(values, st.integers(0, 9), st.lists(st.floats(), max_size=3)),
        ).map(json.dumps),
    ),
    max_size=8,
)  # fmt: skip


@junk
@given(content=lines)
@example(content=["{" + '"a": {' * 50_000])
@example(content=['{"start": 0, "processes": 1000000000000}', '{"step": [1]}', '{"step": "x"}', '{"start": null}'])
@example(
    content=['{"start": 0}', '{"step": 0, "loss": "abc", "weights": {}}', '{"step": 1, "loss": [], "weights": []}']
)
def test_any_ledger_hides_no_run(beside, content):
    """As text, and as lines of a whole chain behind a start."""
    chained = []
    for line in content:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            chained += [value] if isinstance(value, dict) else []
    with tempfile.TemporaryDirectory() as folder:
        LedgerFile(Path(folder, "whole")).append([{"start": 0, "processes": 2}, {"step": 0, "loss": 1.0}, *chained])
        whole = Path(folder, "whole").read_bytes()
        for name in ("whole", "text"):
            Path(folder, "text").write_bytes(whole + "\n".join(content).encode("utf-8", "surrogatepass"))
            with one_line():
                ledger = read_ledger(Path(folder, name))
                check(ledger)
                list(compare(ledger, read_ledger(Path(folder, "whole"))).lines())
    beside(ledger=whole)
    beside(ledger="\n".join(content))


def test_a_line_that_no_run_ledger_writes_is_named_and_the_others_count(tmp_path):
    bad = [{"step": "x"}, {"step": 1, "loss": "abc"}, {"start": None}, {"start": 0, "processes": 10**12}]
    LedgerFile(tmp_path / "a").append([{"start": 0}, {"step": 0}, *bad, {"step": 1}])
    ledger = read_ledger(tmp_path / "a")
    assert (list(ledger.steps), ledger.broken) == ([0, 1], [3, 4, 5, 6])


def test_many_starts_of_a_ledger_cost_as_many_looks(tmp_path):
    """Were each start held against each step, these would be 4e8 comparisons."""
    LedgerFile(tmp_path / "a").append(
        [{"start": 0}, *({"step": step} for step in range(20_000)), *[{"start": 20_000}] * 20_000]
    )
    assert len(read_ledger(tmp_path / "a").steps) == 20_000


# ---- links


@pytest.mark.parametrize("name", ["metrics.csv", "hparams.yaml", "ledger.jsonl", "events.out.tfevents.1"])
def test_a_link_out_of_a_runs_folder_is_not_read(tmp_path, name):
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret: 1\n")
    (run / name).symlink_to(tmp_path / "secret")
    if name in ("hparams.yaml", "ledger.jsonl"):
        (run / "metrics.csv").write_text(TABLE)
    (found,) = find_runs(tmp_path / "runs")
    assert "secret" not in found.settings
    assert not any("secret: 1" in line for line in found.unread)
    if name != "ledger.jsonl":
        assert found.unread[0].endswith(f"a link to {tmp_path / 'secret'}, which is outside of its folder")
    with pytest.raises(UsageError, match="no ledger can be read" if name == "ledger.jsonl" else "No such file"):
        read_ledger(run)
