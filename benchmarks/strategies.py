"""Train one small model under every strategy and write down how far each is from one process, and what it holds.

`python -m benchmarks.strategies` takes about 12 minutes on two CPU cores; docs/strategies.md shows what it wrote.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.stage_file import write
from benchmarks.strategy_rows import BATCH, LENGTH, ROWS, TRIALS, adamw
from benchmarks.strategy_runs import Found, open_rows, start, train_row

# The largest differences from one process that rounding explains: absolute for losses, relative for the rest.
BOUNDS = {"loss": 1e-5, "norm": 1e-6, "gradient": 5e-6}
# The largest share of one process's bytes that counts as sharded as promised: of DeepSpeed, which keeps a second copy
# of its shard of the weights, see docs/deepspeed.md.
SHARES = {
    "fsdp2": 0.51,
    "fsdp2_compiled": 0.51,
    "hsdp": 0.51,
    "tensor": 0.53,
    "tensor_sequence": 0.51,
    "tensor_compiled": 0.51,
    "context_gather": 0.51,
    "context_ulysses": 0.51,
    "fsdp2_tensor": 0.27,
    "fsdp2_context": 0.27,
    "tensor_context": 0.27,
    "hsdp_tensor": 0.27,
    "zero1": 0.76,
    "zero2": 0.76,
    "zero3": 0.66,
}
INTO = ("one", "fsdp2")


def trained(ranks: list[Found], trials: Sequence[str]) -> list[Found]:
    """The same, if every trial was trained.

    Raises:
        RuntimeError: one failed or was refused.
    """
    for trial in trials:
        if "loss" not in ranks[0][trial]:
            raise RuntimeError(f"{trial}: {ranks[0][trial]}")
    return ranks


def against_one(found: Sequence[Found], one: Found) -> dict[str, Any]:
    """One trial's largest differences from the same trial in one process.

    Args:
        found: of each rank; the loss is their mean, the norm and the rest that of each.
        one: of the only process.
    """
    ratios = [[a / b for a, b in zip(rank["norm"], one["norm"], strict=True)] for rank in found]
    norms = [largest(abs(ratio - 1) for ratio in at_a_step) for at_a_step in zip(*ratios, strict=True)]
    return {
        "loss": largest_gap(mean_loss(found), one["loss"]),
        "first_norm": norms[0],
        "norm": largest(norms),
        "lr": largest(largest_gap(rank["lr"], one["lr"]) for rank in found),
        "always_clipped": all(set(rank["clipped"]) == {1.0} for rank in found),
        "same_tokens": all(rank["tokens"] == one["tokens"] for rank in found),
        "same_flops": all(rank["flops"] == one["flops"] for rank in found) if found[0]["flops"] else None,
        "series": {name: found[0][name] for name in ("norm", "lr", "tokens", "flops")} | {"loss": mean_loss(found)},
    }


def mean_loss(found: Sequence[Found]) -> list[float]:
    return [sum(losses) / len(found) for losses in zip(*(rank["loss"] for rank in found), strict=True)]


def largest(values: Iterable[float]) -> float:
    """NaN where one is NaN, which `max` may pass over."""
    return max(values, key=lambda value: (value != value, value))


def largest_gap(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return largest(abs(a - b) for a, b in zip(mine, theirs, strict=True))


def gradient_gap(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest difference between two gradients, relative to the largest entry of its tensor."""
    if mine.keys() != theirs.keys():
        return float("inf")
    return largest(float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


def settings(row: str, table: str) -> list[list[str]]:
    """The entries of a table of parameter groups, without the counts where a rank has some of the layers only."""
    lines = [line.split() for line in table.splitlines()]
    mesh = ROWS[row].mesh
    return lines if mesh is None or mesh.pipeline == 1 else [[line[0], *line[3:]] for line in lines]


def exactness(whole: Sequence[Found], resumed: Sequence[Found], save_at: int) -> dict[str, Any]:
    """How a run that went on from its checkpoint differs from the one that was not interrupted, on any rank."""
    for rank in resumed:
        if "tensors" not in rank:
            return rank
    pairs = list(zip(whole, resumed, strict=True))
    differing = {
        name
        for one, other in pairs
        for name in one["tensors"].keys() | other["tensors"].keys()
        if name not in one["tensors"]
        or name not in other["tensors"]
        or not torch.equal(one["tensors"][name], other["tensors"][name])
    }
    gap = largest(largest_gap(one["loss"][save_at:], other["loss"]) for one, other in pairs)
    return {"loss": gap, "tensors": len(whole[0]["tensors"]), "differing_tensors": len(differing)}


def gap_or_line(found: Sequence[Found], losses: Sequence[float]) -> float | str:
    """How far another layout went on from these losses, or the line that it said."""
    first = found[0]
    if "loss" not in first:
        return next(f"{kind}: {line}" for kind, line in first.items())
    return largest_gap(mean_loss(found), losses[: len(first["loss"])])


def trial_misses(trial: str, figures: dict[str, Any]) -> Iterator[str]:
    """One line for each figure of a trial that differs from one process."""
    # AdamW's later norms are of weights that differ by rounding, divided by gradients of next to nothing
    norm = figures["first_norm" if TRIALS[trial].optimizer is adamw else "norm"]
    for kind, value in (("loss", figures["loss"]), ("norm", norm), ("gradient", figures["gradient"])):
        if not value <= BOUNDS[kind]:
            yield f"{trial}: {kind} {value:.1e}"
    if figures["lr"] != 0:
        yield f"{trial}: lr {figures['lr']:.1e}"
    for kind in ("always_clipped", "same_tokens", "same_flops"):
        uncounted = trial == "foreign" and figures[kind] is None  # what is not ours may be past counting
        if not (figures[kind] or uncounted):
            yield f"{trial}: not {kind}"


def misses(row: dict[str, Any]) -> list[str]:
    """One line for each figure of a row that is not as promised; empty where all are."""
    name = row["row"]
    found = [missed for trial, figures in row["trials"].items() for missed in trial_misses(trial, figures)]
    if row["groups"] is not True:
        found.append(f"groups: {row['groups']}")
    if not row["share"] <= SHARES.get(name, 2.0):
        found.append(f"holds {row['share']:.2f} of one process's bytes")
    if row["resume"].get("loss") != 0 or row["resume"].get("differing_tensors") != 0:
        found.append(f"resume: {row['resume']}")
    of_deepspeed = ROWS[name].needs == "deepspeed"
    for layout, said in row["into"].items():
        refused = of_deepspeed and layout in INTO and str(said).startswith("refused")
        if not (refused or (isinstance(said, float) and said <= BOUNDS["loss"])):
            found.append(f"into {layout}: {said}")
    return found


def jobs(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Pairs (row that saved, row that opens), in lists: the pairs of a list are tried by the same processes."""
    pairs = [(name, name) for name in names] + [(of, name) for name in INTO for of in names if of != name]
    found: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
    for of, name in pairs:
        found.setdefault((ROWS[name].processes, ROWS[name].needs == "deepspeed"), []).append((of, name))
    return list(found.values())


class Table:
    """The rows of one run of this script, measured one after the other.

    Args:
        names: of the rows; `one` is measured in any case.
        steps: that each trial takes; the checkpoint is of six tenths of them.
        folder: for checkpoints, gradients and logs.
    """

    def __init__(self, names: Sequence[str], steps: int, folder: Path) -> None:
        self.left_out = {name: f"needs {ROWS[name].missing}" for name in names if ROWS[name].missing}
        self.names = ["one", *(name for name in names if name != "one" and name not in self.left_out)]
        self.steps, self.save_at, self.folder = steps, steps * 6 // 10, folder

    def measure(self) -> list[dict[str, Any]]:
        """Every row. One that does not train is left out, with the last line of why."""
        found = {}
        for name in self.names:
            try:
                ranks = self._start(train_row, ROWS[name].processes, f"{name}-train", name)
                found[name] = trained(ranks, ROWS[name].trials[:3])
            except Exception as error:
                if name == "one":
                    raise
                self.left_out[name] = str(error).strip().splitlines()[-1]
        opened = {pair: ranks for job in jobs(list(found)) for pair, ranks in self._open(job).items()}
        return [self._row(name, found, opened) for name in found]

    def _open(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[Found]]:
        """What each rank found, by the pair."""
        ranks = self._start(open_rows, ROWS[pairs[0][1]].processes, "open-" + "-".join(pairs[0]), pairs)
        return {pair: [rank[pair] for rank in ranks] for pair in ranks[0]}

    def _start(self, job: Any, processes: int, place: str, what: Any) -> list[Found]:
        return start(job, processes, self.folder / place, what, self.folder, self.steps, self.save_at)

    def _row(
        self, name: str, ran: dict[str, list[Found]], opened: dict[tuple[str, str], list[Found]]
    ) -> dict[str, Any]:
        found, one, trials = ran[name], ran["one"][0], ROWS[name].trials[:3]
        figures, saved = {}, trials[0]
        for trial in trials:
            gradients = [torch.load(self.folder / row / f"gradients-{trial}.pt") for row in (name, "one")]
            compared = against_one([rank[trial] for rank in found], one[trial])
            figures[trial] = compared | {"gradient": gradient_gap(*gradients)}
        losses = mean_loss([rank[saved] for rank in found])[self.save_at :]
        into = {
            other: self._plain(gap_or_line(ranks, losses))
            for (of, other), ranks in opened.items()
            if of == name and other != name
        }
        bytes_held = max((rank[saved]["bytes"] for rank in found), key=lambda held: held["total"])
        grouped = found[0][saved]
        return {
            "row": name,
            "processes": ROWS[name].processes,
            "trials": figures,
            "groups": grouped.get("refused")
            or settings(name, grouped["groups"]) == settings(name, one[saved]["groups"]),
            "bytes": bytes_held,
            "share": bytes_held["total"] / one[saved]["bytes"]["total"],
            "resume": exactness([rank[saved] for rank in found], opened[name, name], self.save_at),
            "into": into,
        }

    def _plain(self, said: float | str) -> float | str:
        return said.replace(f"{self.folder}/", "") if isinstance(said, str) else said


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see --help. 1 where a row is not as promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {' '.join(ROWS)}; default: all")
    parser.add_argument("--steps", type=int, default=10, help="of each run, 4 at least; default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results, if all rows are measured")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in ROWS]:
        parser.exit(2, f"unknown row {' '.join(unknown)}: give some of {' '.join(ROWS)}\n")
    if options.steps < 4:
        parser.exit(2, f"--steps {options.steps}: give 4 at least, as the checkpoint is of the middle\n")
    with tempfile.TemporaryDirectory() as folder:
        table = Table(options.names or list(ROWS), options.steps, Path(folder))
        rows = table.measure()
    for name, reason in table.left_out.items():
        print(f"{name:15} left out: {reason}")
    for row in rows:
        print(f"{row['row']:15} {'; '.join(misses(row)) or 'as promised'}")
    result = {
        "machine": machine.describe(),
        "steps": options.steps,
        "saved_at": table.save_at,
        "batch": {"rows": BATCH, "length": LENGTH},
        "parameters": rows[0]["bytes"]["weights"] // 4,
        "left_out": table.left_out,
        "rows": rows,
    }
    out = options.out
    if out is None and not options.names:
        out = Path(__file__).parent / "results" / f"strategies-{machine.today()}-cpu.json"
    if out is not None:
        write(out, result)
    return int(any(misses(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
