"""Import DeepSpeed when it is first needed; one line says if it is missing, does not import or finds no compiler."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from lightning_tricks._errors import UsageError

INSTALL = "pip install setuptools wheel && DS_BUILD_OPS=0 pip install --no-build-isolation 'deepspeed>=0.19.8'"


def check_installed() -> None:
    """Refuse to go on without the package; it is not imported.

    Raises:
        UsageError: it is missing.
    """
    if "deepspeed" not in sys.modules and find_spec("deepspeed") is None:
        raise UsageError(f"strategy: DeepSpeedZeROStrategy needs deepspeed: {INSTALL}")


def load_deepspeed() -> Any:
    """The package `deepspeed`.

    Raises:
        UsageError: it is missing, or does not import here.
    """
    check_installed()
    try:
        import deepspeed
    except Exception as error:  # it probes compilers and devices while it is imported
        raise UsageError(
            f"strategy: deepspeed is installed but does not import ({_first_line(error)}): {INSTALL} --force-reinstall"
        ) from error
    return deepspeed


@contextmanager
def compiling() -> Iterator[None]:
    """Around code that may compile one of DeepSpeed's own optimizers.

    Raises:
        UsageError: the code failed because the machine has no C++ compiler, or not CUDA's.
    """
    try:
        yield
    except Exception as error:
        missing = _missing_compiler(error)
        if missing is None:
            raise
        raise UsageError(
            f"the optimizer is compiled when it is made, and {missing} is not there ({_first_line(error)}): "
            "install it, or take torch.optim.AdamW with fused: true, which needs none"
        ) from error


def _missing_compiler(error: Exception) -> str | None:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    text = " ".join(f"{type(cause).__name__} {cause}" for cause in causes)
    if "CUDA_HOME" in text or "MissingCUDA" in text:
        return "CUDA's compiler nvcc"
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")) and ("c++" in text or "ninja" in text):
        return "a C++ compiler"
    return None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
