"""The options of `fit` that may stand at the top of a recipe: how a run starts. Other commands read past them."""

from collections.abc import Sequence
from typing import Any

from lightning_tricks._errors import UsageError

# Type, default and help of each.
FIT_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "resume": (
        bool | str | None,
        "none",
        "fit: auto goes on from the newest checkpoint of the recipe that is whole, or starts where there is none; none "
        "starts a new run. --ckpt_path wins over it.",
    ),
    "init_from": (
        str | None,
        None,
        "fit: start a new run from the weights of this checkpoint, file of weights or folder of shards alone.",
    ),
}


def check_fit_options(args: Sequence[str]) -> None:
    """Refuse these options on the command line of another command, or together with a checkpoint to go on from.

    Raises:
        UsageError: see above.
    """
    typed = {arg.partition("=")[0].removeprefix("--") for arg in args if arg.startswith("--")}
    command = next((arg for arg in args if arg in ("validate", "test", "predict", "prepare", "autopsy")), None)
    for name in FIT_OPTIONS.keys() & typed if command else ():
        remedy = "" if command == "prepare" else f"; {command} takes --ckpt_path FILE or last"
        raise UsageError(f"--{name} is an option of fit{remedy}")
    if {"init_from", "ckpt_path"} <= typed and _value("ckpt_path", args) != "none":
        raise UsageError(
            f"init_from={_value('init_from', args)} and ckpt_path={_value('ckpt_path', args)}: --init_from starts a "
            "new run from weights alone, --ckpt_path goes on with a run: give one of them"
        )


def _value(name: str, args: Sequence[str]) -> str:
    """The value of an option on a command line, the last one counts."""
    values = [""]
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        if arg == f"--{name}":
            values.append(following)
        elif arg.startswith(f"--{name}="):
            values.append(arg.partition("=")[2])
    return values[-1]
