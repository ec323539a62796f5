"""Shared by the processes of a benchmark: how a result file is written, and the exit code of a lost device."""

import json
import os
from pathlib import Path
from typing import Any

DEVICE_LOST = 75  # after an error that the CUDA context does not survive, a new process may go on


def write(path: Path, result: dict[str, Any]) -> None:
    """Replace `path` by the result, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
