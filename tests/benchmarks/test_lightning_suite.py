"""The run of Lightning's own tests: on a checkout of five tests, and what counts as a difference, by hand."""

import json
import re
import sys

import lightning.pytorch as pl
import pytest
import torch
from harness import preloaded

import lightning_tricks as lt
from benchmarks import lightning_plugin, lightning_suite

TOY = """
import os
import signal

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel


def trainer():
    return pl.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False,
                      enable_checkpointing=False, enable_model_summary=False)


def test_trains():
    trainer().fit(BoringModel())


def test_counts_callbacks():
    assert trainer().callbacks == []


def test_trains_by_the_number_of_callbacks():
    chosen = trainer()
    torch.manual_seed(len(chosen.callbacks))
    chosen.fit(BoringModel())


def test_trains_as_chance_has_it():
    torch.manual_seed(int.from_bytes(os.urandom(4)))
    trainer().fit(BoringModel())


def test_dies_with_a_callback():
    if trainer().callbacks:
        os.kill(os.getpid(), signal.SIGKILL)


def test_without_a_trainer():
    pass


def test_fails_always():
    raise ValueError("as it is")
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Runs the suite on the toy checkout in a folder; returns its exit code and result."""
    checkout = tmp_path_factory.mktemp("checkout")
    tests = checkout / lightning_suite.TESTS
    tests.mkdir(parents=True)
    (checkout / "src").mkdir()
    (checkout / "src/version.info").write_text("2.6.6\n")
    (checkout / "pytest.ini").write_text("[pytest]\n")
    (tests / "test_toy.py").write_text(TOY)
    folder = tmp_path_factory.mktemp("lines")
    out = folder / "result.json"

    def run(*modes):
        arguments = [str(checkout), *modes, "--folder", str(folder), "--out", str(out)]
        code = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", preloaded.python())
            try:
                lightning_suite.main(arguments)
            except SystemExit as stopped:
                code = stopped.code
        return code, json.loads(out.read_text())

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def watched(suite):
    return suite("monitors")


def test_each_difference_is_found_and_named(watched):
    code, result = watched
    assert code == 1  # nothing explains them
    (found,) = result["modes"].values()
    differences = {row["test"].rpartition("::")[2]: (row["kind"], row["error"]) for row in found["differences"]}
    kind, error = differences.pop("test_counts_callbacks")
    assert kind == "failed"
    assert "AssertionError" in error
    assert differences == {
        "test_trains_by_the_number_of_callbacks": ("differs", "weights, random"),
        "test_dies_with_a_callback": ("crashed", "ended by SIGKILL"),
    }
    assert found["tests"] == 5
    assert found["passed"] == 3
    assert (found["ends"], found["equal"]) == (2, 1)
    assert result["plain"]["outcomes"] == {"passed": 6, "failed": 1}
    assert result["not_the_same_twice"] == ["test_toy.py::test_trains_as_chance_has_it"]
    assert result["lightning_tests"] == "2.6.6"
    assert {"date", "cpu", "cores", "versions"} <= result["machine"].keys()


def test_a_run_that_was_interrupted_goes_on(suite, watched):
    lines = suite.folder / "monitors.jsonl"
    whole = lines.read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(whole) if line.startswith('{"test"'))
    lines.write_text(
        "".join(whole[: first + 1]) + whole[first + 1][:9]
    )  # one result, and a line that ends in the middle
    code, result = suite("monitors")
    assert code == 1
    assert result["modes"]["monitors"]["differences"] == watched[1]["modes"]["monitors"]["differences"]
    results = [json.loads(line)["test"] for line in lines.read_text().splitlines() if line.startswith('{"test"')]
    assert len(results) == len(set(results)) == 5  # none was run twice


def test_an_unknown_mode_is_refused_in_a_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        lightning_suite.main(["checkout", "monitor"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("unknown mode monitor: give some of monitors, StepGuard")


# ------------------------------------------------------------------------------------- what counts as a difference


def end(**changes):
    same = {"of": "fit", "weights": "w", "optimizers": "o", "random": "r", "steps": "s", "metrics": {"loss": "l"}}
    return {**same, **changes}


@pytest.mark.parametrize(
    ("now", "differ"),
    [
        ([end(), end()], []),
        ([end(), end(metrics={"loss": "l", "train/grad_norm": "n"})], []),  # a new metric is what a monitor is for
        ([end(), end(metrics={"train/grad_norm": "n"})], [["metrics"]]),
        ([end(weights="v"), end(metrics={"loss": "k"}, random="q")], [["weights"], ["random", "metrics"]]),
        ([end()], [["number of runs"]]),
    ],
)
def test_ends_are_compared_part_by_part(now, differ):
    compared, found = lightning_suite.fits_that_differ({"fits": [end(), end()]}, {"fits": now})
    assert (compared, found) == (2, differ)


def test_a_digest_sees_one_bit_and_the_type():
    weights = torch.tensor([1.0, 0.0])
    same = [weights.clone(), torch.nn.Parameter(weights).detach()]
    other = [
        torch.tensor([1.0, -0.0]), torch.tensor([1.0000001, 0.0]), weights.bfloat16(), weights[None], [weights], None,
    ]  # fmt: skip
    assert {lightning_plugin.digest(each) for each in same} == {lightning_plugin.digest(weights)}
    assert len({lightning_plugin.digest(each) for each in [weights, *other]}) == 7
    nan = torch.tensor([float("nan")])
    assert lightning_plugin.digest({"a": nan}) == lightning_plugin.digest({"a": nan.clone()})
    strided = torch.arange(6.0).view(2, 3).T
    assert lightning_plugin.digest(strided) == lightning_plugin.digest(strided.contiguous())


def test_safe_checkpoint_takes_the_options_that_it_has():
    takes = lightning_plugin.safe_options(dirpath="d", monitor="loss", mode="max", save_top_k=3, save_last=True)
    assert {**takes, "every_n_minutes": None} == takes
    chosen = lt.SafeCheckpoint(**takes)
    assert (chosen.monitor, chosen.mode, chosen.keep_best) == ("loss", "max", 3)
    for refused in ({"filename": "{epoch}"}, {"save_top_k": -1}, {"save_weights_only": True}, {"save_top_k": 0}):
        assert lightning_plugin.safe_options(**refused) is None


def test_a_mixin_is_put_before_a_class_without_a_method_of_its_own():
    class Own(pl.LightningModule):
        def configure_gradient_clipping(self, *args, **kwargs):
            pass

    uses = []
    mix = lightning_plugin.Mixed(lt.GradientClippingMixin, "configure_gradient_clipping", lambda: uses.append(1))
    plain, own = pl.LightningModule(), Own()
    take_out = mix(plain)
    assert isinstance(plain, lt.GradientClippingMixin)
    take_out()
    assert type(plain) is pl.LightningModule
    mix(own)()
    assert type(own) is Own
    assert uses == [1]


def test_every_mode_has_its_parts_and_each_reason_names_modes():
    others = {"SafeCheckpoint", "precision", "BF16Mixed", "GradientClippingMixin"}
    assert set(lightning_suite.MODES) == {*lightning_plugin.CALLBACKS, *others}
    for make in lightning_plugin.CALLBACKS.values():
        assert make()
    packages = {type(monitor).__module__.split(".")[1] for monitor in lightning_plugin.monitors()}
    assert packages == {"monitors", "outputs"}  # neither changes training
    assert len(lightning_plugin.monitors()) > 10
    for modes, _, _, why in lightning_suite.REASONS:
        assert any(re.fullmatch(modes, mode) for mode in lightning_suite.MODES), why
        assert why
