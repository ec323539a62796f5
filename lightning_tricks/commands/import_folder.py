"""`import`: a recipe that goes on training the model of a Hugging Face folder. Reads `config.json` and headers only."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import printable, say, shell_word, yaml_text
from lightning_tricks._host.writable import check_file
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
_SHORT = """\
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
        "lightning-tricks import",
        description="Write a recipe whose decoder, first weights and tokenizer are those of a folder that transformers "
        "saved: Llama, Qwen3, Arcee, Apertus or GPT-2. `fit --init_from FOLDER` alone does the same for a recipe that "
        "has the decoder already. Any strategy loads the folder, FSDP2Strategy on each rank its shards.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", help="with config.json and safetensors")
    parser.add_argument("--output", required=True, help="the recipe to write, which must not exist")
    parser.add_argument("--config", help="a recipe whose other settings are taken over; default: a short recipe")
    options = parser.parse_args(args)
    folder, output = Path(options.folder), Path(options.output)
    check_file("import: output", output)
    if os.path.lexists(output):
        raise UsageError(f"import: output={output} exists: name another file, or remove it first")
    if not is_hf_folder(folder):
        raise UsageError(f"import: {folder} has no config.json: give a folder that save_pretrained or export wrote")
    config = decoder_of_folder(folder)
    text = _of_base(options.config, folder, config) if options.config else _short(folder, config)
    output.write_text(f"# Goes on with the weights of {printable(folder)}, by `import`.\n{text}", encoding="utf-8")
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


def _short(folder: Path, config: DecoderConfig) -> str:
    data = "class_path: TextData\n  init_args: {"
    if tokenizer_file(folder).is_file():
        check_tokenizer(folder, config)
        data += f"tokenizer: {yaml_text(_setting(folder), one_line=True)}, "
    data += f"seq_len: {min(config.max_seq_len, _LONGEST_ROW)}, micro_batch_size: 8}}"
    return _SHORT.format(
        folder=yaml_text(_setting(folder), one_line=True),
        decoder=_settings(config),
        data=data,
        name=yaml_text(_run_name(folder), one_line=True),
    )


def _setting(folder: Path) -> str:
    """The path of a folder as a setting of a recipe."""
    return str(folder) if _stays_text(str(folder)) else f".{os.sep}{folder}"


def _run_name(folder: Path) -> str:
    name = folder.resolve().name
    return name if _stays_text(name) else f"import_{name}"


def _stays_text(text: str) -> bool:
    """Whether a setting stays this text: jsonargparse reads some as values, such as `null` or `1e3`, if quoted too."""
    with contextlib.suppress(ValueError):
        float(text)
        return False
    with contextlib.suppress(yaml.YAMLError):
        return isinstance(yaml.safe_load(text), str)
    return True


def check_tokenizer(folder: Path, config: DecoderConfig) -> None:
    """Refuse a tokenizer without an end of text, or with more tokens than the model has."""
    tokenizer = load_tokenizer(tokenizer_file(folder))
    end_of_text(tokenizer)
    if (size := vocabulary_size(tokenizer)) > config.vocab_size:
        raise UsageError(f"{folder}: its tokenizer has {size} tokens and its model {config.vocab_size}")


def _of_base(base: str, folder: Path, config: DecoderConfig) -> str:
    """The settings of another recipe, with the decoder, the weights and the tokenizer of the folder."""
    try:
        recipe = _read_whole(Path(base))
        recipe["model"]["init_args"]["decoder"]
    except OSError as error:
        raise UsageError(f"import: config={base}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
        raise UsageError(
            f"import: config={base} has no model.init_args.decoder: give a recipe of LanguageModel"
        ) from None
    recipe["model"]["init_args"]["decoder"] = {"class_path": type(config).__name__, "init_args": _changed(config)}
    recipe["init_from"] = _setting(folder)
    data = recipe.get("data")
    if isinstance(data, str):
        recipe["data"] = data = {"class_path": data}
    if isinstance(data, dict) and tokenizer_file(folder).is_file():
        check_tokenizer(folder, config)
        settings = data["init_args"] = data.get("init_args") or {}
        settings["tokenizer"] = _setting(folder)
        settings.pop("vocab_size", None)  # of a tokenizer to learn
        if isinstance(length := settings.get("seq_len"), int) and length > config.max_seq_len:
            settings["seq_len"] = config.max_seq_len
    return yaml_text(recipe) + "\n"


def _read_whole(recipe: Path) -> Any:
    """The settings of a recipe, with those of the files that it includes, which lie beside it and not beside a copy."""
    settings = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if isinstance(value, str) and value.endswith((".yaml", ".yml")) and (part := recipe.parent / value).is_file():
            settings[name] = yaml.safe_load(part.read_text(encoding="utf-8"))
    return settings
