"""`eval`: scores of a checkpoint on tasks of lm_eval. Needs the checkpoint, which holds its tokenizer; no recipe."""

import argparse
import json
from importlib.metadata import version
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_json, check_json, write_json
from lightning_tricks.commands.generate import trained_model
from lightning_tricks.outputs._text_model import TextModel
from lightning_tricks.outputs.lm_eval import harness


def run(args: list[str]) -> None:
    """Print lm_eval's table of the tasks, and write its results if a file is named."""
    options = _parse(args)
    with check_json("eval", options.json):
        results = _results(options)
    write_json(options.json, results)


def _results(options: argparse.Namespace) -> dict[str, Any]:
    lm_eval_model = harness()
    tasks = lm_eval_model.Tasks(options.tasks, options.include_path, options.num_fewshot)
    path, decoder, saved, device = trained_model(options.ckpt_path, options.average)
    model = TextModel(decoder, saved.tokenizer, device, saved.eot_id, decoder.config.max_seq_len)
    results = lm_eval_model.evaluate(
        model, tasks, options.batch_size, options.max_length, options.limit, stderr=not options.no_stderr
    )
    from lm_eval.utils import handle_non_serializable, make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    names = ("average", "num_fewshot", "limit", "batch_size", "max_length")
    results["config"] = {"checkpoint": str(path), **{name: getattr(options, name) for name in names}}
    results["lm_eval_version"] = version("lm_eval")
    return json.loads(json.dumps(results, default=handle_non_serializable))


def _parse(args: list[str]) -> argparse.Namespace:
    parser = CommandParser(
        "eval",
        description="Score the model of a checkpoint on tasks of lm_eval (EleutherAI's lm-evaluation-harness), with "
        "the tokenizer in the checkpoint. Runs on the GPU if there is one, in the number format of the saved weights. "
        "lm_eval downloads the data of its own tasks.",
    )
    parser.add_argument(
        "--ckpt_path", required=True, help="a file, or a folder of shards; last: the newest below this folder"
    )
    parser.add_argument("--tasks", required=True, type=_names, help="names of tasks and groups, or YAML files: A,B")
    parser.add_argument("--include_path", help="folder with definitions of more tasks")
    parser.add_argument("--average", help="use this average in place of the weights: ema, tail_average")
    parser.add_argument("--num_fewshot", type=int, help="examples before each question; default: as each task says")
    parser.add_argument("--limit", type=float, help="questions of each task, or below 1 a share; default: all")
    parser.add_argument("--batch_size", type=int, default=8, help="rows in a forward pass; default %(default)s")
    parser.add_argument("--max_length", type=int, help="tokens in the longest row; default: the model's")
    parser.add_argument("--no_stderr", action="store_true", help="leave out the standard errors")
    add_json(parser)
    options = parser.parse_args(args)
    for name, above in (("batch_size", 0), ("max_length", 0), ("num_fewshot", -1), ("limit", 0)):
        value = getattr(options, name)
        if value is not None and value <= above:
            raise UsageError(f"eval: {name}={value}: give a number above {above}")
    return options


def _names(text: str) -> Any:
    names = [name for name in text.split(",") if name]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no task")
    return names
