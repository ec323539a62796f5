"""pytest's rewriting of asserts, once for all workers: in each it would take as long as a minute of the tests.

The process that has the workers rewrites while a server imports (`preloaded`) what the workers are forked with. What
pytest finds rewritten in `__pycache__` is left to it. Functions of pytest that are private are used, as in 9.2.
"""

import marshal
import os
import pickle
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

FOLDER = "REWRITTEN_TESTS"  # in which a worker finds the rewritten files


def rewrite_all(config: pytest.Config, folder: Path) -> None:
    """Rewrite the test files that this session was asked for, for the workers that are started from now on."""
    for path in sorted(_files(config)):
        pyc = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, pyc) is None:
            source, code = rewrite._rewrite_test(path, config)
            (folder / _name_of(path)).write_bytes(pickle.dumps((source, marshal.dumps(code))))
    os.environ[FOLDER] = str(folder)


def _files(config: pytest.Config) -> set[Path]:
    given = [Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args]
    inside = {path for folder in given for path in folder.rglob("*.py")}
    patterns = config.getini("python_files")
    return {path for path in {*given, *inside} if path.is_file() and any(path.match(pattern) for pattern in patterns)}


def _name_of(path: Path) -> str:
    return str(path).replace(os.sep, "%")


def take() -> None:
    """Let pytest take what was rewritten for this worker."""
    if FOLDER not in os.environ:
        return
    folder, real = Path(os.environ[FOLDER]), rewrite._rewrite_test

    def taken(path: Path, config: pytest.Config) -> tuple:
        kept = folder / _name_of(path)
        if not kept.exists():
            return real(path, config)
        source, code = pickle.loads(kept.read_bytes())
        return source, marshal.loads(code)

    rewrite._rewrite_test = taken
