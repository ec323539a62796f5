"""The public names of the collection, out of the `__all__` of its modules: two lists that nobody writes by hand.

    python docs/scripts/public_names.py          # writes lightning_tricks/__init__.pyi and callbacks/__init__.py
    python docs/scripts/public_names.py --check  # writes nothing; exits with 1 if one of them is out of date

A name is public if its module, which is no package, has it in `__all__`. Those of `monitors`, `guards` and `outputs`,
and `MetricBuffer`, stand in `lightning_tricks.callbacks` too.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_tricks"
CALLBACKS = ("guards", "metrics.metric_buffer", "monitors", "outputs")  # modules, or packages of them
STUB_DOCSTRING = (
    '"""The public names: type checkers and editors read them here, and `__init__.py` finds their modules here."""\n'
)
CALLBACKS_DOCSTRING = (
    '"""The public names of every callback: `monitors` watch, `guards` act, `outputs` write for people."""\n'
)


def public_names() -> dict[str, str]:
    """The module of each public name.

    Raises:
        ValueError: two modules have one name.
    """
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "__init__.py":
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in _all_of(ast.parse(path.read_text(encoding="utf-8"))):
            if name in found:
                raise ValueError(f"{name} is public in {found[name]} and in {module}")
            found[name] = module
    return dict(sorted(found.items()))


def _all_of(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def texts() -> dict[Path, str]:
    """What the two files hold."""
    names = public_names()
    of_callbacks = {
        name: module for name, module in names.items() if module.removeprefix("lightning_tricks.").startswith(CALLBACKS)
    }
    return {
        PACKAGE / "__init__.pyi": f"{STUB_DOCSTRING}\n{_imports(names)}\n__version__: str\n",
        PACKAGE / "callbacks/__init__.py": f"{CALLBACKS_DOCSTRING}\n{_imports(of_callbacks)}",
    }


def _imports(names: dict[str, str]) -> str:
    lines = sorted((module, name) for name, module in names.items())
    return "".join(f"from {module} import {name} as {name}\n" for module, name in lines)


def main(args: list[str]) -> int:
    """Write the files, or say which of them is out of date."""
    stale = [path for path, text in texts().items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" in args:
            print(f"{path.relative_to(ROOT)} is out of date: run python docs/scripts/public_names.py")
        else:
            path.write_text(texts()[path], encoding="utf-8")
    return int(bool(stale) and "--check" in args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
