"""How much there is to carry: lines of code of the package and of its tests, without docstrings and comments.

python -m benchmarks.size            # a line for each of the two
python -m benchmarks.size --folders  # and one for each folder in them
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(source: str) -> int:
    """Number of lines that hold code: a token that is no comment and no part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folders", action="store_true", help="a line for each folder as well")
    with_folders = parser.parse_args().folders
    for top in ("lightning_tricks", "tests"):
        sizes = {path: lines_of_code(path.read_text()) for path in sorted((ROOT / top).rglob("*.py"))}
        print(f"{top:24} {len(sizes):5} files {sum(sizes.values()):7,} lines of code")
        folders: Counter[str] = Counter()
        for path, lines in sizes.items():
            folders[path.relative_to(ROOT / top).parts[0]] += lines
        for folder, lines in folders.most_common() if with_folders else ():
            print(f"  {folder:35} {lines:7,}")


if __name__ == "__main__":
    main()
