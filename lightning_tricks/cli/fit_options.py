"""Options and their values: those of `fit` at the top of a recipe, and what Lightning accepts and fails on later.

The options of `fit` say where a run starts, and how long it is. Other commands ignore them in a recipe.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jsonargparse import Namespace

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.machine import listed, named_devices
from lightning_tricks.callbacks import InitFrom, TotalTokens

UNREAD = argparse.SUPPRESS  # the help of an option that may stand in a recipe, and that a command does not read
_LARGEST_SEED = 2**32 - 1  # numpy's

# Type, default and help of each.
FIT_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "resume": (Literal["auto", "none"] | None, "none", "fit: auto resumes from the newest complete checkpoint of the "
               "recipe, or starts if there is none; none starts a new run. --ckpt_path wins over it."),
    "total_tokens": (float | None, None, "fit: tokens to train on in all, such as 2e9, in place of trainer.max_steps"),
    "init_from": (str | None, None, "fit: start a new run from the weights alone of this checkpoint, file or folder"),
    "elastic": (bool, False, "fit: under torchrun, train on the processes that it has started, and on the rows a step "
                "of the recipe's num_nodes x devices, with more or fewer micro-batches on each. Needs --resume auto."),
}  # fmt: skip


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse values among a command's parsed options that Lightning accepts and fails on later.

    Raises:
        UsageError: a seed that no generator takes; an interval of 0; devices that are no number.
    """
    seed = options.get("seed_everything")
    if not isinstance(seed, bool | None) and not 0 <= seed <= _LARGEST_SEED:
        raise UsageError(f"seed_everything={seed}: give a whole number from 0 to {_LARGEST_SEED}")
    trainer = options.get("trainer", {})
    if not isinstance(trainer, Mapping | Namespace):
        raise UsageError(
            f"trainer={json.dumps(trainer)}: give settings below it, such as `trainer: {{max_steps: 100}}`, or leave "
            "it out"
        )
    for option, remedy in (
        ("accumulate_grad_batches", "the micro-batches of one optimizer step, 1 or more"),
        ("val_check_interval", "a number above 0, or limit_val_batches: 0 for no validation"),
        ("check_val_every_n_epoch", "1 or more, or null to count batches only"),
        ("limit_train_batches", "a number above 0; to evaluate without training there is the command validate"),
        ("num_nodes", "the number of hosts"),
    ):
        value = trainer.get(option)
        if isinstance(value, int | float) and (math.isnan(value) or value <= 0):
            raise UsageError(f"trainer.{option}={value}: give {remedy}")
    named_devices(trainer)
    if isinstance(clip := trainer.get("gradient_clip_val"), int | float) and not clip >= 0:
        raise UsageError(f"trainer.gradient_clip_val={clip}: give a number above 0, or null for no clipping")


def check_fit_options(args: Sequence[str], command: str | None, options: Any, unread: Sequence[str] = ()) -> None:
    """Refuse these options among the words of another command, or together with a checkpoint to go on from.

    Typed beside a recipe's `init_from`, `--ckpt_path` goes on with the run that has started there.
    """
    typed = {arg.partition("=")[0].removeprefix("--") for arg in args if arg.startswith("--")}
    for name in typed.intersection(unread):
        raise UsageError(f"{command} has no option '{name}'; --help lists the options")
    allowed = {"total_tokens"} if command in ("schedule", "plan", "check") else set()  # of a fit of that length
    for name in (FIT_OPTIONS.keys() & typed) - allowed if command not in ("fit", None) else ():
        start = "ckpt_path" in options and name in ("resume", "init_from")
        remedy = f"; {command} takes --ckpt_path FILE or last" if start else ""
        raise UsageError(f"--{name} is an option of fit{remedy}")
    starts = {name: options.get(name) for name in ("init_from", "ckpt_path")}
    goes_on = "ckpt_path" in typed and "init_from" not in typed  # a run that has begun with the recipe's init_from
    if command in ("fit", None) and all(starts.values()) and starts["ckpt_path"] != "none" and not goes_on:
        raise UsageError(
            f"init_from={starts['init_from']} and ckpt_path={starts['ckpt_path']}: init_from starts a new run from "
            "weights alone, ckpt_path goes on with a run: give one of them"
        )


def choose_length(options: Any, args: Sequence[str]) -> str | None:
    """Let one length of the run count, steps or tokens: that of the command line wins over that of the recipe.

    The other one is taken out of `options`; returns a line that says so. Both in one place are refused.
    """
    tokens, trainer = options.get("total_tokens"), options.get("trainer")
    if tokens is None or trainer is None:
        return None
    line, steps = None, trainer["max_steps"]
    if steps != -1:
        typed = {arg.partition("=")[0] for arg in args}
        if ("--total_tokens" in typed) == ("--trainer.max_steps" in typed):
            raise UsageError(
                f"total_tokens={tokens:g} and trainer.max_steps={steps}: give one of them; on the command line, "
                "--total_tokens wins over the recipe's max_steps, and --trainer.max_steps over its total_tokens"
            )
        if "--trainer.max_steps" in typed:
            options["total_tokens"] = None
            return f"trainer.max_steps={steps} replaces the recipe's total_tokens={tokens:g}"
        trainer["max_steps"] = -1
        line = f"total_tokens={tokens:g} replaces the recipe's trainer.max_steps={steps}"
    if trainer["max_epochs"] is None:
        trainer["max_epochs"] = -1  # as Lightning does where max_steps is given
    return line


def option_callbacks(options: Any, module: Any = None) -> list[Any]:
    """The callbacks that carry these options out, to stand before the recipe's own; the checkpoint is chosen."""
    found: list[Any] = []
    if options.get("init_from") is not None:
        found.append(InitFrom(options["init_from"]))
        if options["ckpt_path"] is None:
            found[0].check(module)
    if options.get("total_tokens") is not None:
        total = TotalTokens(options["total_tokens"])
        total.resumes = options["ckpt_path"] is not None
        found.insert(0, total)
    return found


def settings_of_fit(options: Any, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments of a recipe, with the length in tokens among its callbacks, as a `fit` has it."""
    settings = dict(trainer)
    if options.get("total_tokens") is not None:
        settings["callbacks"] = [TotalTokens(options["total_tokens"]), *listed(settings, "callbacks")]
    return settings
