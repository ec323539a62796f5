"""One run from its folder: how far it came, its validations, its speed, its settings. Imports no torch.

It reads whatever is there: our loggers' files or Lightning's, of this collection's runs or of another project's.
"""

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_tricks._foreign_files import number_of, open_csv, parse_json, read_settings, read_text, why
from lightning_tricks.commands.runs.event_file import Scalars, read_events
from lightning_tricks.monitors.doctor.run_log import ROLES

BITS = "val/bits_per_byte"
_VAL_LOSSES, _TRAIN_LOSSES = ROLES["val_loss"], ROLES["loss"]
_GOODPUT, _SECONDS, _MFU, _BATCH = "goodput/steps", "goodput/wall_seconds", "throughput/mfu", "train/batch_tokens"
_LAST = (_GOODPUT, _SECONDS, _MFU, *_TRAIN_LOSSES)
ACTIVE_SECONDS = 600.0  # since the last write to a log, after which a run that has not ended counts as stopped
_SETTINGS = ("config.yaml", "hparams.yaml")
# Settings that name the run or its place, and not how it trains.
_PLACES = ("trainer.logger", "trainer.default_root_dir", "ckpt_path", "resume", "config", "weights_only")


@dataclass(frozen=True)
class Run:
    """One run; None stands for what its folder does not tell.

    Args:
        name: path of its folder below the one that was looked through.
        state: `finished`; `failed`, where the last training loss is no number; `active`, where its log was written to
            within the last ten minutes; `stopped`; `empty`, without any step; `unreadable`, a folder that cannot be
            entered.
        steps: optimizer steps done.
        val_loss: of the last validation.
        best_val_loss: the smallest one.
        best_step: optimizer steps done at that validation.
        bits_per_byte: of the last validation.
        best_bits_per_byte: the smallest one.
        tokens: of all steps and processes.
        hours: from the first start to the last write, as GoodputMonitor measures it, else by the times in the logs.
        goodput: share of that time that made progress, the last one of GoodputMonitor.
        mfu: the last one of MFUMonitor.
        settings: of config.yaml, else of hparams.yaml, by their dotted names.
        unread: a line for each file, or part of one, that could not be read.
    """

    name: str
    state: str
    steps: int | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    bits_per_byte: float | None = None
    best_bits_per_byte: float | None = None
    tokens: int | None = None
    hours: float | None = None
    goodput: float | None = None
    mfu: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    unread: Sequence[str] = ()


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run: it has a log, checkpoints or settings, or is one of Lightning's versions."""
    if any((folder / name).is_file() for name in ("metrics.csv", "hparams.yaml")) or (folder / "checkpoints").is_dir():
        return True
    return bool(re.fullmatch(r"version_\d+", folder.name) or event_files(folder))


def read_run(folder: Path, name: str = "", val_loss: str | None = None, now: float | None = None) -> Run:
    """The run in a folder.

    Args:
        folder: of the run.
        name: for the result.
        val_loss: name of the validation loss; None: the first of the usual ones that was logged.
        now: seconds since 1970; None for the present.
    """
    losses = _VAL_LOSSES if val_loss is None else (val_loss,)
    scalars = read_scalars(folder, (*losses, BITS, _BATCH), _LAST)
    document, unread = settings_of(folder)
    saved = _saved_steps(folder)
    steps = max((each for each in (scalars.steps, saved) if each is not None), default=None)
    loss = next((scalars.series[name] for name in losses if scalars.series.get(name)), {})
    bits = scalars.series.get(BITS, {})
    best = _best(loss)
    seconds = _seconds(folder, scalars)
    return Run(
        name=name or folder.name,
        state=_state(folder, scalars, steps, document, time.time() if now is None else now),
        steps=steps,
        val_loss=loss[max(loss)] if loss else None,
        best_val_loss=loss[best] if best is not None else None,
        best_step=best + 1 if best is not None else None,
        bits_per_byte=bits[max(bits)] if bits else None,
        best_bits_per_byte=None if (at := _best(bits)) is None else bits[at],
        tokens=_tokens(document, scalars, steps),
        hours=seconds / 3600 if seconds is not None else None,
        goodput=scalars.last.get(_GOODPUT),
        mfu=scalars.last.get(_MFU),
        settings={key: value for key, value in flat(document).items() if not key.startswith(_PLACES)},
        unread=(*scalars.unread, *unread),
    )


def event_files(folder: Path) -> list[Path]:
    """TensorBoard's files of a run."""
    return list(folder.glob("events.out.tfevents.*"))


def _best(points: Mapping[int, float]) -> int | None:
    """The step of the smallest finite value, the first of several."""
    finite = [step for step in sorted(points) if math.isfinite(points[step])]
    return min(finite, key=lambda step: points[step], default=None)


def read_scalars(folder: Path, series: Iterable[str], last: Iterable[str]) -> Scalars:
    """Figures of the log in a folder: of `metrics.csv` where that has steps, else of event files.

    Args:
        folder: of a run.
        series: names of which every point is wanted.
        last: names of which the last value is wanted.
    """
    found, every, latest = Scalars(), list(series), list(last)
    if (table := folder / "metrics.csv").exists():
        try:
            _read_csv(table, every, latest, found)
        except (OSError, ValueError) as error:
            found.unread.append(f"{table.name}: {why(error)}")
    if found.steps is None and (events := event_files(folder)):
        unread = found.unread
        # not the tokens of a batch: each step has a record of them, and whoever wants these reads all of the log
        found = read_events(events, [name for name in every if name != _BATCH], latest)
        found.unread[:0] = unread
    return found


def _read_csv(file: Path, series: Iterable[str], last: Iterable[str], found: Scalars) -> None:
    with open_csv(file) as rows:
        columns = rows.columns
        wanted = [(columns[name], found.series.setdefault(name, {})) for name in series if name in columns]
        ends = [(columns[name], name) for name in last if name in columns]
        for step, row in rows:
            found.steps = step + 1
            for column, points in wanted:
                if row[column] and (value := number_of(row[column])) is not None:
                    points[step] = value
            for column, name in ends:
                if row[column] and (value := number_of(row[column])) is not None:
                    found.last[name] = value
        if (problem := rows.problem()) is not None:
            found.unread.append(f"{file.name}: {problem}")


def _saved_steps(folder: Path) -> int | None:
    """Optimizer steps of the newest checkpoint, by its name: `step=200.ckpt`, or Lightning's `epoch=0-step=200`."""
    names = (re.search(r"step=(\d{1,15})(?!\d)", path.name) for path in (folder / "checkpoints").glob("*.ckpt"))
    return max((int(found[1]) for found in names if found), default=None)


def _seconds(folder: Path, scalars: Scalars) -> float | None:
    """Wall time: GoodputMonitor's; that of the records; that of its file; between the files of a start and the log."""
    if _SECONDS in scalars.last:
        return scalars.last[_SECONDS]
    if scalars.first_time is not None and scalars.last_time is not None:
        return max(scalars.last_time - scalars.first_time, 0.0)
    try:
        processes = parse_json(read_text(folder / "goodput.json"))["processes"]
        seconds = float(max(end for _, end in processes) - min(start for start, _ in processes))
        if math.isfinite(seconds):
            return seconds
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        started = min((folder / name).stat().st_mtime for name in _SETTINGS if (folder / name).exists())
        return max((folder / "metrics.csv").stat().st_mtime - started, 0.0)
    except (OSError, ValueError):
        return None


def _state(folder: Path, scalars: Scalars, steps: int | None, document: Any, now: float) -> str:
    if not steps:
        return "empty"
    if any(not math.isfinite(scalars.last[name]) for name in _TRAIN_LOSSES if name in scalars.last):
        return "failed"
    planned = _at(document, "trainer", "max_steps")
    if scalars.ended or (isinstance(planned, int) and 0 < planned <= steps):
        return "finished"
    logs = [folder / "metrics.csv", folder / "goodput.json", *event_files(folder)]
    written = max((file.stat().st_mtime for file in logs if file.exists()), default=0.0)
    return "active" if now - written < ACTIVE_SECONDS else "stopped"


# ---- settings


def settings_of(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings of a run, of config.yaml or else of hparams.yaml, and a line for each that cannot be read."""
    unread: list[str] = []
    for file in (folder / name for name in _SETTINGS):
        try:
            if file.exists() and (found := read_settings(file)):
                return found, unread
        except (OSError, ValueError) as error:
            unread.append(f"{file.name}: {why(error)}")
    return {}, unread


def _at(document: Any, *names: str) -> Any:
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _tokens(document: Any, scalars: Scalars, steps: int | None) -> int | None:
    """Tokens of all steps: rows, length, accumulation and processes by the settings; None where one is not known."""
    trainer, data = _at(document, "trainer"), _at(document, "data", "init_args")
    sizes = [_at(data, "micro_batch_size"), _at(data, "seq_len"), _at(trainer, "accumulate_grad_batches") or 1]
    if steps is None or not all(map(_is_count, sizes)):
        return None
    if any("BatchSizeWarmup" in str(_at(callback, "class_path")) for callback in _list(_at(trainer, "callbacks"))):
        batches = scalars.series.get(_BATCH, {})
        if len(batches) < steps or not set(range(steps)) <= batches.keys():
            return None
        tokens = sum(batches[step] for step in range(steps))
        return round(tokens) if math.isfinite(tokens) else None
    # an elastic run keeps the rows of the full run that its recipe describes, on however many processes
    processes = _data_ranks(trainer, None if _at(document, "elastic") else scalars.devices)
    return None if processes is None else math.prod(sizes) * processes * steps


def _data_ranks(trainer: Any, world: int | None) -> int | None:
    """Number of processes with rows of their own, of `world` processes, or of those that the settings name."""
    if world is None:
        devices, nodes = _at(trainer, "devices"), _at(trainer, "num_nodes") or 1
        if isinstance(devices, list):
            devices = len(devices)
        if _at(trainer, "accelerator") == "cpu" and devices == "auto":
            devices = 1
        if not _is_count(devices) or not _is_count(nodes):
            return None
        world = devices * nodes
    mesh = _at(trainer, "strategy", "init_args", "mesh")
    return world // math.prod(size for axis in ("tensor", "context") if _is_count(size := _at(mesh, axis)))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def flat(document: Any, before: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, without `class_path` and `init_args`: a class is the value of its place.

    Example:
        >>> flat({"model": {"class_path": "a.Llama", "init_args": {"d_model": 8}}, "trainer": {"callbacks": ["b.EMA"]}})
        {'model': 'Llama', 'model.d_model': 8, 'trainer.callbacks': ['b.EMA']}
    """
    if isinstance(document, dict) and "class_path" in document:
        name = str(document["class_path"]).rpartition(".")[2]
        inner = flat(document.get("init_args") or {}, before)
        return {before.removesuffix("."): name, **inner}
    if isinstance(document, dict):
        return {
            key: value for name, inner in document.items() for key, value in flat(inner, f"{before}{name}.").items()
        }
    if isinstance(document, list) and document and all(_at(one, "class_path") for one in document):
        names = [str(one["class_path"]).rpartition(".")[2] for one in document]
        found: dict[str, Any] = {before.removesuffix("."): ", ".join(names)}
        for name, one in zip(names, document, strict=True):
            found |= flat(one.get("init_args") or {}, f"{before}{name}.")
        return found
    return {before.removesuffix("."): document}
