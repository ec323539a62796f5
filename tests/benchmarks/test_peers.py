"""Peers compute the same losses from the same weights and batches; their figures are those worked out by hand."""

import contextlib
import io
import json

import pytest
import torch

from benchmarks import peers
from benchmarks.peer_loops import PEERS, Job

TOY = peers.SIZES["toy"]


class EndError(Exception):
    """The batches have ended."""


def some_batches(count):
    yield from peers.token_batches(TOY, count)
    raise EndError


def losses_of(name, folder):
    # Three batches for two steps: Lightning fetches one ahead.
    job = Job(peers.llama(TOY), TOY.length, False, False, folder, some_batches(3))
    with pytest.raises(EndError):
        PEERS[name](job)
    return [float(loss) for loss in job.losses[:2]]


@pytest.mark.parametrize("name", [name for name in PEERS if name != peers.BASE])
def test_every_peer_computes_the_same_losses(name, tmp_path, monkeypatch):
    if name == "litgpt":
        monkeypatch.syspath_prepend(str(peers.LITGPT))
    if package := peers.missing(name):
        pytest.skip(f"{package} is not installed")
    expected = losses_of(peers.BASE, tmp_path)
    assert expected[0] != expected[1]
    # 16 roundings, of sums in another order; another learning rate or another weight differs by a thousand times that.
    assert losses_of(name, tmp_path) == pytest.approx(expected, rel=16 * 2**-23)


def test_a_peer_runs_as_many_steps_as_it_is_told_and_answers_once_an_order(monkeypatch):
    def ended(code):
        raise EndError

    monkeypatch.setattr(peers.os, "_exit", ended)
    losses, answers = [], io.StringIO()
    orders = io.StringIO("3\n2\n")
    with contextlib.suppress(EndError):
        for _ in peers.obey(peers.token_batches(TOY, 2), losses, orders, answers):
            losses.append(torch.tensor(float(len(losses))))
    said = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [answer["losses"] for answer in said] == [[], [0.0, 1.0, 2.0], [3.0, 4.0]]
    assert [sorted(answer) for answer in said] == [["losses"], *[["cpu", "losses", "wall"]] * 2]


def test_ratios_and_the_share_of_the_peak_are_taken_within_a_round():
    def seconds(*rounds):
        return [{"cpu": value, "wall": value} for value in rounds]

    found = {peers.BASE: seconds(1.0, 4.0), "ours": seconds(2.0, 2.0), peers.PEAK: seconds(1.0, 2.0)}
    result = peers.summary(found, {peers.BASE: [3.0, 2.0, 1.0], "ours": [3.0, 2.5]}, TOY)
    row = result["peers"]["ours"]
    assert row["cpu_ratio"]["rounds"] == [2.0, 0.5]
    assert row["loss_deviation"] == 0.5
    shares = [result["flops_per_step"] / 2 / (2 * 1024**3 / peak) for peak in (1.0, 2.0)]
    assert row["share_of_peak"]["rounds"] == pytest.approx(shares, abs=1e-4)


def test_a_process_that_trains_and_one_that_fails(tmp_path):
    peer = peers.Peer(peers.BASE, "toy", False, False, tmp_path / "bare")
    broken = peers.Peer("no such peer", "toy", False, False, tmp_path / "none")
    peer.order(2)
    assert peer.answer() == {}
    assert peer.answer().keys() == {"cpu", "wall"}
    assert len(peer.losses) == 2
    with pytest.raises(RuntimeError, match="no such peer"):
        broken.answer()
    peer.end()
    broken.end()


def test_wrong_words_get_a_line(capsys):
    with pytest.raises(SystemExit):
        peers.main(["--sizes", "9B"])
    assert "sizes: unknown 9B: give some of toy, 5M, 30M" in capsys.readouterr().err
