"""README.md of an exported folder: what the model is, how it was trained, its figures, and how to load it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_tricks._core.quote import markdown_block, markdown_code, markdown_text
from lightning_tricks.data.cursor import BatchHistory
from lightning_tricks.logs.scalars import read_scalars

_FIGURES = {"val/loss": "validation loss", "val/bits_per_byte": "validation bits/byte"}
_LOAD_HF = """```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(".")
inputs = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```"""
_LOAD_HF_WITHOUT_TOKENIZER = """```python
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")  # this folder
logits = model(torch.tensor([[0, 1, 2]])).logits  # of token ids: there is no tokenizer
```"""
_LOAD_GGUF = """```sh
llama-completion -m model.gguf -p "def " -n 32 -no-cnv
llama-quantize model.gguf model-q8_0.gguf Q8_0
```"""
_SHARES = {"val/ema_share": "ema", "val/tail_average_share": "tail_average"}  # of an average, in what was validated


class Figures(NamedTuple):
    """The last validation of a run before a checkpoint.

    Args:
        step: optimizer steps that were done.
        values: by the name of the metric.
        average: of the weights, if it was validated in their place.
    """

    step: int
    values: Mapping[str, float]
    average: str | None = None


class Target(NamedTuple):
    """The library that a folder is for.

    Args:
        library: its name on the Hugging Face hub.
        words: its name in a sentence.
        model: row of the table that names its class, or its architecture.
        how_to_load: commands or code.
    """

    library: str
    words: str
    model: str
    how_to_load: str


def transformers_target(class_name: str, has_tokenizer: bool) -> Target:
    """A folder of transformers."""
    load = _LOAD_HF if has_tokenizer else _LOAD_HF_WITHOUT_TOKENIZER
    return Target("transformers", "transformers", f"| class | `{class_name}` |", load)


def llama_cpp_target(architecture: str) -> Target:
    """A folder with a GGUF file."""
    return Target("gguf", "llama.cpp, in GGUF", f"| architecture | `{architecture}` |", _LOAD_GGUF)


def figures_of_run(checkpoint: Path, step: int) -> Figures | None:
    """The figures that the run's own log has: `metrics.csv` or TensorBoard's file, in the folder above `checkpoints`.

    None where there is no such log, or no validation before `step`.
    """
    run = checkpoint.absolute().parent.parent
    points = {tag: of_tag.by_step() for tag, of_tag in read_scalars(run, {*_FIGURES, *_SHARES}).metrics.items()}
    # a logger counts steps from 0: what is logged after the step number n + 1 stands under n
    last = max((done for of_tag in points.values() for done in of_tag if done + 1 <= step), default=None)
    if last is None:
        return None
    at_last = {tag: of_tag[last] for tag, of_tag in points.items() if last in of_tag}
    average = next((name for tag, name in _SHARES.items() if at_last.get(tag)), None)
    return Figures(last + 1, {tag: at_last[tag] for tag in _FIGURES if tag in at_last}, average)


def model_card(
    name: str,
    target: Target,
    parameters: int,
    dtype: str,
    checkpoint: Mapping[str, Any],
    figures: Figures | None,
    *,
    average: str | None,
    compared: str,
) -> str:
    """The text of README.md.

    Args:
        name: of the folder.
        target: the library that the folder is for.
        parameters: their number, a tied matrix counted once.
        dtype: of the files.
        checkpoint: without weights.
        figures: of the run, if its log is there.
        average: of the weights, if one was exported.
        compared: one sentence: what was compared with the checkpoint, and how far they differ.
    """
    data = _data_state(checkpoint)
    rows = [
        target.model,
        f"| parameters | {parameters:,} in {dtype} |",
        f"| step | {markdown_text(checkpoint.get('global_step', 'unknown'))} |",
    ]
    if "samples" in data and "seq_len" in data:
        taken = BatchHistory.of_state(data.get("history", [])).rows_taken_before(
            data["samples"]
        )  # without skipped ones
        rows.append(f"| training tokens | {taken * data['seq_len']:,} |")
    for key, word in (("data", "training data"), ("content", "hash of the data's content")):
        if key in data:
            rows.append(f"| {word} | {markdown_code(data[key])} |")
    rows += [f"| weights | the average {markdown_code(average)} |"] if average else []
    own = checkpoint.get("lightning_tricks", {})
    rows += [f"| averaged | {markdown_code(path)}, share {share:.4g} |" for path, share in own.get("average_of", [])]
    if figures is not None:
        of = f"the average {figures.average}" if figures.average else "the weights"
        whose = f"at step {figures.step}, of {of}"
        rows += [f"| {_FIGURES[key]} | {value:.4f}, {whose} |" for key, value in figures.values.items()]
    missing = "The log of the run was not beside the checkpoint, so no validation figures stand here."
    recipe = own.get("recipe")
    parts = [
        f"---\nlibrary_name: {target.library}\npipeline_tag: text-generation\n---",
        f"# {markdown_text(name)}",
        f"A language model, trained with lightning_tricks and exported for {target.words}.",
        "\n".join(["| | |", "|---|---|", *rows]),
        *([] if figures else [missing]),
        compared,
        "## How to load it",
        target.how_to_load,
    ]
    if recipe:
        parts += ["## Recipe", markdown_block(recipe.strip(), "yaml")]
    return "\n\n".join(parts) + "\n"


def _data_state(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of the data module: the one with a fingerprint of its data."""
    for state in checkpoint.values():
        if isinstance(state, Mapping) and isinstance(state.get("data"), str):
            return state
    return {}
