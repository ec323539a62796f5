"""`average`: one file of weights, the average of those of several checkpoints. Needs no recipe and no GPU."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks._host.writable import check_file
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.load_weights import StreamedWeights, stream_weights
from lightning_tricks.checkpoints.record import KEY
from lightning_tricks.checkpoints.write_file import write_file
from lightning_tricks.commands import CommandParser
from lightning_tricks.data.tokenizer import find_record
from lightning_tricks.mixins.optimizer_mixin import MUP_KEY

# what belongs to one run and is not that of an average
_OF_ONE_RUN = ("optimizer_states", "lr_schedulers", "callbacks", "loops", "random_states")


def run(args: list[str]) -> None:
    """Write FILE from the checkpoints."""
    parser = CommandParser(
        "average",
        description="Average the weights of checkpoints of one model, files or folders of shards, in fp64. The file "
        "has the recipe, the tokenizer and the step of the last of them, no optimizer state and no average that they "
        "hold (ema): fit --init_from, "
        "validate, generate and export open it.",
    )
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help="at least two")
    parser.add_argument("--output", required=True, help="the file to write, which must not exist")
    parser.add_argument("--weights", help="a number for each checkpoint, as 1,2,1; default: all the same")
    options = parser.parse_args(args)
    output = Path(options.output)
    check_file("average: output", output)
    if output.exists():
        raise UsageError(f"average: output={output} exists: name another file, or remove it first")
    if len(options.checkpoints) < 2:
        raise UsageError(f"average: {options.checkpoints[0]}: give at least two checkpoints")
    shares = shares_of(options.weights, len(options.checkpoints))
    paths = [local_copy(path) for path in options.checkpoints]
    places = [path.resolve() for path in paths]
    if twice := next((path for number, path in enumerate(paths) if places[number] in places[:number]), None):
        raise UsageError(
            f"average: {twice}: given twice: name each checkpoint once; --weights makes one count for more"
        )
    sources = [stream_weights(path) for path in paths]
    for other in sources[1:]:
        check_same_model(sources[0], other)
    state, of_last = averaged(sources, shares)
    content = {key: value for key, value in sources[-1].rest.items() if key not in _OF_ONE_RUN}
    content[KEY] = {key: value for key, value in content.get(KEY, {}).items() if key != "record"} | {
        "average_of": [[str(path), share] for path, share in zip(paths, shares, strict=True)]
    }
    write_file({**content, "state_dict": state}, output)
    for path, share, source in zip(paths, shares, sources, strict=True):
        say(f"{path}: step {source.rest.get('global_step', '?')}, share {share:.4g}")
    for name in dict.fromkeys(name for source in sources for name in source.averages):
        say(f"{name}: an average inside the checkpoints, left out: the weights that were trained are averaged")
    for name in of_last:
        say(f"{name}: whole numbers that differ: those of {paths[-1]}")
    say(f"{output}: the average of {len(paths)} checkpoints, {len(state):,} tensors")


def shares_of(weights: str | None, count: int) -> list[float]:
    """The share of each checkpoint, of `1,2,1` or equal; they add up to 1."""
    if weights is None:
        return [1 / count] * count
    try:
        numbers = [float(word) for word in weights.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(0 <= number < float("inf") for number in numbers) or not sum(numbers):
        raise UsageError(f"average: weights={weights}: give {count} numbers of at least 0, as {','.join('1' * count)}")
    return [number / sum(numbers) for number in numbers]


def check_same_model(one: StreamedWeights, other: StreamedWeights) -> None:
    """Refuse checkpoints of two models, or of two tokenizers.

    Raises:
        UsageError: the first setting, name or shape that differs.
    """
    here, there = _settings(one.rest), _settings(other.rest)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise _differ(one, other, name, here.get(name), there.get(name))
    for name in [*one.shapes, *other.shapes]:
        if (name in one.shapes) != (name in other.shapes):
            lacking = one if name in other.shapes else other
            raise UsageError(f"average: {lacking.path} has no '{name}', which the others have: give those of one model")
        if one.shapes[name][0] != other.shapes[name][0]:
            raise _differ(one, other, f"the shape of '{name}'", one.shapes[name][0], other.shapes[name][0])


def _settings(rest: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how weights are used: the decoder, muP's base and the tokenizer."""
    of_decoder = {f"decoder.{name}": value for name, value in (rest.get("decoder_config") or {}).items()}
    record = find_record(dict(rest))
    return {**of_decoder, "mup": rest.get(MUP_KEY), "tokenizer": None if record is None else record["sha256"][:8]}


def _differ(one: StreamedWeights, other: StreamedWeights, name: str, here: Any, there: Any) -> UsageError:
    return UsageError(
        f"average: {name} is {here} in {one.path} and {there} in {other.path}: give checkpoints of one model"
    )


@torch.no_grad()
def averaged(sources: Sequence[StreamedWeights], shares: Sequence[float]) -> tuple[dict[str, Tensor], list[str]]:
    """The average of each weight, computed in fp64 and kept in the dtype of the last source.

    Args:
        sources: with the same names and shapes.
        shares: of each; they add up to 1.

    Returns:
        The weights by name, and the names of tensors of whole numbers that are not equal in all sources, of which the
        last source's are taken: a mean of counters is none.
    """
    state: dict[str, Tensor] = {}
    of_last: list[str] = []
    for name in sources[-1].shapes:
        last = sources[-1].read(name)
        if not (last.is_floating_point() or last.is_complex()):
            state[name] = last.clone()
            if any(not torch.equal(source.read(name), last) for source in sources[:-1]):
                of_last.append(name)
            continue
        wide = torch.complex128 if last.is_complex() else torch.float64
        total = torch.zeros(last.shape, dtype=wide)
        for source, share in zip(sources, shares, strict=True):
            total.add_(source.read(name).to(wide), alpha=share)
        state[name] = total.to(last.dtype)
    if "decoder.head.weight" in state and (sources[-1].rest.get("decoder_config") or {}).get("tie_embeddings"):
        state["decoder.head.weight"] = state["decoder.embed.weight"]  # one matrix, once in the file
    return state, of_last
