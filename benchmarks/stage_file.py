"""Shared by the processes of a benchmark: how a result file is written and gone on with; the code of a lost device."""

import json
import os
import sys
from pathlib import Path
from typing import Any

DEVICE_LOST = 75  # after an error that the CUDA context does not survive, a new process may go on


def write(path: Path, result: dict[str, Any]) -> None:
    """Replace `path` by the result, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def resume(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The result that an earlier process has left in `path`, or `fresh` where there is none.

    Ends the process where the file is of another device, or one is of toy sizes and the other is not: ratios within
    a file compare runs of one device.

    Args:
        path: the result file.
        fresh: has `machine`, of `machine.describe()`, and `dry`.
    """
    if not path.exists():
        return fresh
    result = json.loads(path.read_text(encoding="utf-8"))
    for name, here in (("machine", fresh["machine"].get("gpu_uuid")), ("dry", fresh["dry"])):
        there = result.get(name)
        if (there.get("gpu_uuid") if isinstance(there, dict) else there) != here:
            sys.exit(f"{path} has results of another {'GPU' if name == 'machine' else 'size'}: give another --out")
    return result


def to_try_again(result: dict[str, Any]) -> dict[str, Any]:
    """What a later call goes on with: the result without that which failed, so that it is tried again."""
    kept = {**result, "failures": [], "left_out": []} if "failures" in result else dict(result)
    kept.pop("under_way_seconds", None)
    if "running" in kept:
        kept["running"] = {} if isinstance(kept["running"], dict) else None
    if "checks" in kept:
        kept["checks"] = [check for check in kept["checks"] if check["ok"]]
    if "tests" in kept:
        kept["tests"] = {name: test for name, test in kept["tests"].items() if test["outcome"] != "failed"}
    return kept
