"""A run that is told to stop, at every place: its exit code, one new checkpoint, and nothing lost or done twice."""

import pytest
from harness.processes import run
from harness.token_files import write_token_files
from preempted_run import STEPS, cases

HOWS = ("SIGTERM", "SIGUSR1", "SIGINT", "deadline")
# the step after which one process stops
PLACES = {
    "setup": 0, "sanity check": 0, "compile": 1, "window": 3, "step": 3, "save": 3, "validation is due": 4,
    "validation": 4, "loader": 5,
}  # fmt: skip
# Each place with one of the four reasons, and below, with two processes, with another one.
ALONE = [(place, HOWS[i % 4]) for i, place in enumerate(PLACES)]


def code_of(how: str) -> int:
    return 130 if how == "SIGINT" else 143


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_token_files(folder)
    return folder


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    todo = [(place, how, (0,)) for place, how in (*ALONE, ("last step", "SIGINT"))]
    return folder, *run(cases, 1, "ModelCheckpoint", data, folder, todo, world=1)


@pytest.mark.long
@pytest.mark.parametrize(("place", "how"), ALONE)
def test_one_process(alone, place, how):
    folder, results = alone
    case = f"{place}-{how}-0"
    result, step = results[case], PLACES[place]
    assert (result["code"], result["again"]) == (code_of(how), None)
    assert result["files"] == ["last.ckpt"]
    assert result["steps"] == [(step, step // 2)]  # what is due at that step is validated before
    assert result["lines"] == 2 * step
    for name in ("losses0.txt", "csv/metrics.csv"):
        assert (folder / case / name).read_text() == (folder / "unbroken" / name).read_text()


@pytest.mark.long
def test_in_the_last_step_the_run_ends_as_ever(alone):
    result = alone[1]["last step-SIGINT-0"]
    assert (result["code"], result["lines"]) == (None, 2 * STEPS)


# With two processes a stop is agreed upon one step later, or after the validation in between. Each place has one of the
# four reasons, which come to rank 0 alone, to rank 1 alone or to both.
TOGETHER = {**PLACES, "compile": 2, "window": 4, "step": 4, "save": 4, "loader": 6}
RANKS = ((0,), (1,), (0, 1))
PAIRS = [
    (place, HOWS[(i + 2) % 4], (0,) if place == "save" else RANKS[(i + 1) % 3]) for i, place in enumerate(TOGETHER)
]


@pytest.fixture(scope="module")
def together(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    return folder, *run(cases, 2, "SafeCheckpoint", data, folder, [*PAIRS, ("last step", "SIGTERM", (1,))])


@pytest.mark.long
@pytest.mark.parametrize(("place", "how", "ranks"), PAIRS)
def test_two_processes(together, place, how, ranks):
    folder, *both = together
    case = f"{place}-{how}-{'-'.join(map(str, ranks))}"
    results, step = [results[case] for results in both], TOGETHER[place]
    assert [(result["code"], result["again"]) for result in results] == [(code_of(how), None)] * 2
    assert results[0]["steps"] == [(3, 1)] * (step > 3) + [(step, step // 2)]  # that of an interval, and the new one
    assert [result["lines"] for result in results] == [2 * step] * 2
    for name in ("losses0.txt", "losses1.txt", "csv/metrics.csv"):
        assert (folder / case / name).read_text() == (folder / "unbroken" / name).read_text()


@pytest.mark.long
def test_a_rank_that_is_told_in_the_last_step_lets_the_run_end(together):
    assert [results["last step-SIGTERM-1"]["code"] for results in together[1:]] == [None, None]
