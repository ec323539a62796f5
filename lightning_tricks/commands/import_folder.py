"""`import`: a recipe that goes on training the model of a Hugging Face folder. Reads `config.json` and headers only."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import printable, say, shell_word, yaml_text
from lightning_tricks._host.writable import check_file
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.hf_folder import (
    check_depth,
    is_hf_folder,
    open_weights,
    read_config,
    read_hf_folder,
    tokenizer_file,
)
from lightning_tricks.checkpoints.load_weights import matched
from lightning_tricks.commands import CommandParser
from lightning_tricks.data.tokenizer import end_of_text, load_tokenizer, vocabulary_size
from lightning_tricks.models import GPT2, Decoder, DecoderConfig, hf_family
from lightning_tricks.models.hf_adapter import hf_weights

_LONGEST_ROW = 1024  # tokens of the short recipe's rows: longer ones take memory that a laptop may not have
_RECIPE = """\
seed_everything: 0
init_from: {folder}
model:
  class_path: LanguageModel
  init_args:
    decoder: {decoder}
    optimizer: {{class_path: AdamW, init_args: {{lr: 1.0e-4, betas: [0.9, 0.95]}}}}
    schedule: {{class_path: WarmupCosine, init_args: {{warmup_steps: 20}}}}
data:
  {data}
trainer:
  max_steps: 200
  gradient_clip_val: 1.0
  log_every_n_steps: 10
  val_check_interval: 100
  logger: {{class_path: ResumingCSVLogger, init_args: {{save_dir: runs, name: {name}}}}}
  callbacks:
    - StepGuard
    - {{class_path: SafeCheckpoint, init_args: {{every_n_train_steps: 100}}}}
"""


def run(args: list[str]) -> None:
    """Write a recipe for FOLDER."""
    parser = CommandParser(
        "import",
        description="Write a recipe whose decoder, first weights and tokenizer are those of a folder that transformers "
        "saved: Llama, Qwen3, Arcee, Apertus, GPT-2, or with experts Mixtral, Qwen3-MoE, OLMoE or dots1. `fit "
        "--init_from FOLDER` alone does the same for a recipe that has the decoder already. Any strategy loads the "
        "folder, FSDP2Strategy on each rank its shards.",
    )
    parser.add_argument("folder", help="with config.json and safetensors")
    parser.add_argument("--output", required=True, help="the recipe to write, which must not exist")
    options = parser.parse_args(args)
    output = Path(options.output)
    check_file("import: output", output)
    if os.path.lexists(output):
        raise UsageError(f"import: output={output} exists: name another file, or remove it first")
    folder = local_copy(options.folder)
    if not is_hf_folder(folder):
        raise UsageError(f"import: {folder} has no config.json: give a folder that save_pretrained or export wrote")
    config = decoder_of_folder(folder)
    text = f"# Goes on with the weights of {printable(folder)}, by `import`.\n{_recipe(folder, config)}"
    output.write_text(text, encoding="utf-8")
    count = sum(torch.Size(weight.shape).numel() for weight in hf_weights(config))
    say(f"{folder}: {hf_family(config).class_name}, {count:,} parameters, as {_settings(config)}")
    if not tokenizer_file(folder).is_file():
        print("no tokenizer.json: set `data` to text with the tokenizer of the model, or to its token ids")
    say(output, f"Next: python -m lightning_tricks fit --config {shell_word(output)}")


def decoder_of_folder(folder: Path) -> DecoderConfig:
    """The decoder of a folder, whose weights have its names and shapes.

    Raises:
        UsageError: see `read_hf_folder`; the first weight that only one of the two has, or that has another shape.
    """
    config = read_config(folder)
    stored = open_weights(folder)
    check_depth(config, stored, folder)
    biases = [tensor for name, tensor in stored.items() if name.endswith(".bias") and tensor.dim() == 1]
    if isinstance(config, GPT2) and not any(tensor.any() for tensor in biases):
        config = dataclasses.replace(config, bias=False)  # transformers' GPT-2 keeps zeros for a model without
    with torch.device("meta"):
        decoder = Decoder(config)
    matched(decoder, read_hf_folder(folder, decoder)["state_dict"], folder)
    return config


def _settings(config: DecoderConfig) -> str:
    """The family and the settings that differ from its defaults, as a recipe has them."""
    settings = {"class_path": type(config).__name__, "init_args": _changed(config)}
    return yaml_text(settings, one_line=True)


def _changed(config: DecoderConfig) -> dict[str, Any]:
    fields = {field.name: field.default for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    for name, same in (("n_kv_heads", config.n_heads), ("d_ff", dataclasses.replace(config, d_ff=None).ffn_width)):  # type: ignore[type-var]
        if getattr(config, name) == same:  # as it would be if it were left out
            fields[name] = same
    return {name: getattr(config, name) for name, default in fields.items() if getattr(config, name) != default}


def _recipe(folder: Path, config: DecoderConfig) -> str:
    setting = os.path.join(os.curdir, folder)  # no name of a folder is then read as a value, such as `null`
    data = "class_path: TextData\n  init_args: {"
    if tokenizer_file(folder).is_file():
        check_tokenizer(folder, config)
        data += f"tokenizer: {yaml_text(setting, one_line=True)}, "
    data += f"seq_len: {min(config.max_seq_len, _LONGEST_ROW)}, micro_batch_size: 8}}"
    return _RECIPE.format(
        folder=yaml_text(setting, one_line=True),
        decoder=_settings(config),
        data=data,
        name=yaml_text(f"import_{folder.resolve().name}", one_line=True),
    )


def check_tokenizer(folder: Path, config: DecoderConfig) -> None:
    """Refuse a tokenizer without an end of text, or with more tokens than the model has."""
    tokenizer = load_tokenizer(tokenizer_file(folder))
    end_of_text(tokenizer)
    if (size := vocabulary_size(tokenizer)) > config.vocab_size:
        raise UsageError(f"{folder}: its tokenizer has {size} tokens and its model {config.vocab_size}")
