"""The training stages of gpu.py: tokens/s and peak memory of a recipe, beside other loops or in other formats.

Runs in a process of its own: `python -m benchmarks.gpu_train STAGE --out FILE`. First each contender runs a few steps
that are not timed, in which everything is compiled; then they take turns. A row is on disk as soon as its clock has
stopped, and a new process on the same file goes on with the others.
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.contenders import CONTENDERS
from benchmarks.feed import load, own_loader, write_tokens
from benchmarks.gpu_checks import clean_up, require_device
from benchmarks.gpu_peers import PEERS
from benchmarks.gpu_sizes import EOT, MEAN_DOCUMENT, SIZES, Size, toy, variants
from benchmarks.stage_file import resume, write
from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.accounting import matmul_parameters, training_flops_per_token
from lightning_tricks.precision import float8_kept

Row = dict[str, Any]
COMPILING_SHARE = 0.6  # of a stage's time: what is not compiled by then is left out, so that the others are timed
_ENDLESS = 10**9  # micro-batches, of which a window takes as many as it needs


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process: while the clock runs there should be no new one."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def graph_breaks() -> int:
    """How often torch.compile gave a piece of code back to Python; blocks that it traces whole have none."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@contextmanager
def whole_peak() -> Iterator[list[float]]:
    """Collect every peak in GiB that somebody ends while this lasts: MemoryMonitor starts a new one at a log step."""
    peaks: list[float] = []
    reset = torch.cuda.reset_peak_memory_stats

    def keep_and_reset(*args: Any, **kwargs: Any) -> None:
        peaks.append(torch.cuda.max_memory_allocated() / 2**30)
        reset(*args, **kwargs)

    with replaced(torch.cuda, "reset_peak_memory_stats", keep_and_reset):
        yield peaks


@contextmanager
def nothing_moves_to_the_host() -> Iterator[None]:
    """Lightning moves weights and optimizer state there at the end, 75 GiB at 7B; here they are thrown away."""
    strategy: Any = sys.modules[pl.strategies.Strategy.__module__]
    move = strategy._optimizers_to_device

    def to_device(optimizers: Any, device: torch.device) -> None:
        if device.type != "cpu":
            move(optimizers, device)

    with (
        replaced(pl.LightningModule, "cpu", lambda module: module),
        replaced(strategy, "_optimizers_to_device", to_device),
    ):
        yield


def plain(contender: str) -> str:
    """A contender's name without `_again`, which marks a second run of the same."""
    return contender.removesuffix("_again")


def unknown(contenders: Sequence[str]) -> list[str]:
    """Those of the contenders that neither `variants` nor a loop has."""
    known = {*variants("bf16-mixed", dry=False, emulate=False), *CONTENDERS, *PEERS}
    return [name for name in contenders if plain(name) not in known]


class Window:
    """What `Meter` calls: starts the clock after the warm-up, and stops it after whole log intervals, the device idle.

    Args:
        size: how long.
        peaks: of `whole_peak`.
        state: of the device.
        ended: called once with the figures, when the clock has stopped.
    """

    def __init__(
        self, size: Size, peaks: list[float], state: machine.DeviceState, ended: Callable[[Row], None]
    ) -> None:
        self.size, self.peaks, self.state, self.ended = size, peaks, state, ended
        self.cuda = torch.cuda.is_available()
        self.first = size.warmup * size.accumulate
        self.begun = time.perf_counter(), compiled_graphs(), graph_breaks()
        self.start = self.begun
        self.warmup: Row = {}

    def __call__(self, index: int) -> bool:
        """Whether training ends before micro-batch `index`."""
        if index == self.first:
            self._wait()
            now = time.perf_counter(), compiled_graphs(), graph_breaks()
            self.warmup = {
                "warmup_seconds": now[0] - self.begun[0],
                "graphs_compiled_in_warmup": now[1] - self.begun[1],
                "peak_warmup_gib": self._peak(),
            }
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
            self.peaks.clear()
            self.state.start()
            self.start = time.perf_counter(), *now[1:]
        done = index - self.first
        whole = done > 0 and done % (self.size.log_every * self.size.accumulate) == 0
        if not whole or done < self.size.timed * self.size.accumulate:
            return False
        if time.perf_counter() - self.start[0] < self.size.seconds:
            return False
        self._wait()
        seconds = time.perf_counter() - self.start[0]
        self.ended({
            "micro_batch_ms": 1000 * seconds / done,
            "timed_micro_batches": done,
            "timed_seconds": seconds,
            **self.warmup,
            "graphs_compiled_while_timed": compiled_graphs() - self.start[1],
            "graph_breaks": graph_breaks() - self.begun[2],
            "peak_allocated_gib": self._peak(),
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if self.cuda else None,
            **self.state.summary(),
        })  # fmt: skip
        return True

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _peak(self) -> float | None:
        return max([*self.peaks, torch.cuda.max_memory_allocated() / 2**30]) if self.cuda else None


def run_once(
    size: Size, contender: str, shards: str, folder: Path, dry: bool, keep: Callable[[Row], None] | None
) -> Row:
    """Train a recipe for some steps.

    Args:
        size: how long.
        contender: what trains.
        shards: the data.
        folder: for what is written.
        dry: toy sizes.
        keep: gets the figures as soon as the clock has stopped. None: as many micro-batches run as the warm-up has
            steps, so that everything is compiled.

    Returns:
        What is known when training has ended: last loss and norm.
    """
    cuda = torch.cuda.is_available()
    kinds, name = variants(size.base, dry, emulate=not cuda), plain(contender)
    cli: Any = load(size.recipe, shards, folder, (*size.options, *kinds.get(name, ())))
    # Here everyone reads through the data module, as there is time to do so while the device works.
    loops = {**CONTENDERS, **dict.fromkeys(kinds, CONTENDERS["ours_loader"]), **PEERS}

    def ended(figures: Row) -> None:
        assert keep is not None
        data = cli.datamodule
        tokens = data.micro_batch_size * data.seq_len
        keep({"tokens_per_second": 1000 * tokens / figures["micro_batch_ms"], **figures, **_setting(cli)})

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    # delayed scales begin with the second step, within the warm-up, and not with the 17th
    early = replaced(float8_kept, "WINDOW", 1)
    with early, machine.device_state(cuda) as state, whole_peak() as peaks, nothing_moves_to_the_host():
        window = Window(size, peaks, state, ended)
        mark = (lambda index: index >= size.warmup) if keep is None else window
        loops[name](cli, own_loader(cli), _ENDLESS, mark)
    ends = {name: last_logged(cli, f"train/{name.removeprefix('last_')}") for name in ("last_loss", "last_grad_norm")}
    vars(cli).clear()  # jsonargparse keeps the last parser in a ContextVar, and that one keeps its command line
    return ends


def _setting(cli: Any) -> Row:
    """The run's options and what its steps should cost, as the recipe that was built says."""
    data, config, plugin = cli.datamodule, cli.model.config, cli.trainer.precision_plugin
    heads = config.n_heads, config.kv_heads, data.seq_len, config.head_dim
    low = torch.bfloat16  # in which every format that is compared here attends
    chooses = torch.cuda.is_available() and not data.document_ids  # within documents the decoder does
    flops = {kind: training_flops_per_token(config, data.seq_len, kind) for kind in ("causal", "full")}
    in_fp8 = getattr(plugin, "peak_dtype", None) == "fp8"  # emulated fp8 runs in bf16
    converted = 6 * matmul_parameters(config) * plugin.converted_share if in_fp8 else 0.0
    return {
        "seq_len": data.seq_len,
        "micro_batch_size": data.micro_batch_size,
        "accumulate_grad_batches": cli.trainer.accumulate_grad_batches,
        "log_every_n_steps": cli.trainer.log_every_n_steps,
        "precision": str(cli.trainer.precision),
        "fp8_share": {kind: converted / count for kind, count in flops.items()},
        "activation_checkpointing": cli.model.activation_checkpointing,
        "compile_blocks": cli.model.compile_blocks,
        "attention": machine.attention_backend(*heads, low) if chooses else None,
        "matmul_parameters": matmul_parameters(config),
        "flops_per_token": flops,
    }


def last_logged(cli: Any, name: str) -> float | None:
    """The value of a metric at the last log step; None where the contender logs none."""
    value = cli.trainer.callback_metrics.get(name)
    return None if value is None else float(value)


def order(contenders: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """Round and contender of every run: each round begins with another contender."""
    return [
        (number, contenders[(place + number) % len(contenders)])
        for number in range(rounds)
        for place in range(len(contenders))
    ]


class Stage:
    """The runs of one stage and their file.

    Args:
        name: one of `SIZES`.
        out: result file; runs of an earlier process in it are kept, and a run that ended that process counts as failed.
        dry: toy sizes, on a CPU where there is no GPU.
        seconds: how long this process may take.
    """

    def __init__(self, name: str, out: Path, dry: bool, seconds: float) -> None:
        self.name, self.out, self.dry, self.seconds, self.start = name, out, dry, seconds, time.perf_counter()
        fresh = {"stage": name, "machine": machine.describe(), "dry": dry, "untimed": [], "runs": [], "failures": []}
        self.result: dict[str, Any] = resume(out, {**fresh, "left_out": [], "running": {}})
        if self.result["running"]:
            self._fail("ended the process: it crashed, or hung")
            self.write()  # there may be nothing left to run
        self.size = toy(SIZES[name], torch.cuda.is_available()) if dry else SIZES[name]

    def write(self) -> None:
        write(self.out, self.result)

    def passed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def train(self, contenders: Sequence[str]) -> bool:
        """Measure the recipe with each contender, as long as another run is likely to fit; whether none failed."""
        with tempfile.TemporaryDirectory() as folder:
            sizes = (256, 100_000) if self.dry else (32000, 20_000_000)
            shards = write_tokens(Path(folder), *sizes, EOT, MEAN_DOCUMENT)
            turns = order(contenders, self.size.rounds)
            for contender in dict.fromkeys(map(plain, contenders)) if self.size.compile_first else ():
                if not any(plain(name) == contender and not self._is_done(turn, name) for turn, name in turns):
                    continue
                if self.passed() > COMPILING_SHARE * self.seconds:
                    print(f"{self.name}: no time to compile {contender}")
                    self.result["left_out"].append(contender)
                    continue
                self._run(None, contender, shards, Path(folder))
            for number, contender in turns:
                if self._is_done(number, contender) or plain(contender) in self.result["left_out"]:
                    continue
                if self.passed() + self.expected_seconds(contender) > self.seconds:
                    print(f"{self.name}: no time for round {number + 1}, {contender}")
                    break
                self._run(number, contender, shards, Path(folder))
        self.write()
        return not self.result["failures"]

    def expected_seconds(self, contender: str) -> float:
        """How long another run takes: as long as the longest one of this contender, or of all and a quarter more."""
        runs = [run for run in self.result["runs"] if plain(run["contender"]) == plain(contender)]
        margin = 1.0 if runs else 1.25
        return margin * max((run.get("run_seconds", 0.0) for run in runs or self.result["runs"]), default=0.0)

    def _is_done(self, number: int, contender: str) -> bool:
        failed = any(plain(failure["contender"]) == plain(contender) for failure in self.result["failures"])
        return failed or any((run["round"], run["contender"]) == (number, contender) for run in self.result["runs"])

    def _run(self, number: int | None, contender: str, shards: str, folder: Path) -> None:
        """One run; a round without a number is not timed. A contender that raises is not tried again."""
        result, start, graphs = self.result, time.perf_counter(), compiled_graphs()
        print(f"== {self.name}, {'untimed' if number is None else f'round {number + 1}'}, {contender}", flush=True)
        result["running"] = {"round": number, "contender": contender}
        self.write()
        row: Row = {"round": number, "contender": contender}

        def keep(figures: Row) -> None:
            row.update(figures)
            result["runs"].append(row)
            self.write()

        try:
            ends = run_once(self.size, contender, shards, folder, self.dry, None if number is None else keep)
        except Exception as error:
            traceback.print_exc()
            self._fail("".join(traceback.format_exception_only(error)).strip()[-2000:])
            traceback.clear_frames(error.__traceback__)  # they hold the model
        else:
            if number is None:
                result["untimed"].append(row)
                row["graphs"] = compiled_graphs() - graphs
            else:
                row.update(ends)
        result["running"] = {}
        row["run_seconds"] = time.perf_counter() - start
        self.write()
        clean_up()
        row["left_gib"] = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        row["run_seconds"] = time.perf_counter() - start
        self.write()

    def _fail(self, why: str) -> None:
        """Count the run that is under way as failed."""
        self.result["failures"].append({**self.result["running"], "error": why})
        self.result["running"] = {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line, for gpu.py. Exit code 1 if a contender failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=SIZES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--contenders", default="ours,bare,stock")
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args(arguments)
    contenders = options.contenders.split(",")
    if not torch.cuda.is_available():  # toy sizes on a CPU
        contenders = [name for name in contenders if plain(name) != "ours_graphs"]
    if not_known := unknown(contenders):
        parser.error(f"unknown contender {' '.join(not_known)}: add it to `variants` in gpu_sizes.py, or leave it out")
    require_device(options.dry)
    # Several contenders share this process, each with graphs of its own. Past its limit torch would go on eagerly, and
    # the figure would be another one's: then it shall fail instead.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        fine = Stage(options.stage, options.out, options.dry, options.seconds).train(contenders)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
