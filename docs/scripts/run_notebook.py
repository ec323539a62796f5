"""Run the notebook in a kernel of this Python, and store its outputs in it.

    pip install ipykernel nbclient && python docs/scripts/run_notebook.py

It needs a minute on two cores. Nothing in the file names this machine: a cell that prints a path of it ends the script.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples/lightning_tricks.ipynb"


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The outputs of a cell, pieces of one stream as one."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if found and output.output_type == "stream" == found[-1].output_type and output.name == found[-1].name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def main() -> None:
    """Run all cells in their order; an error in one ends the script, and leaves the file as it was."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ["NO_COLOR"] = "1"  # a kernel asks for colors, with which curves are drawn in other characters
    NotebookClient(notebook, record_timing=False, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    notebook.metadata.language_info = {"name": "python"}  # without the version
    for cell in notebook.cells:
        cell.outputs = joined(cell.get("outputs", [])) if cell.cell_type == "code" else []
        if cell.cell_type != "code":
            del cell["outputs"]
    text = nbformat.writes(notebook)
    if private := [path for path in (str(Path.home()) + os.sep, str(ROOT), sys.prefix) if path in text]:
        sys.exit(f"an output names {private[0]}")
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
