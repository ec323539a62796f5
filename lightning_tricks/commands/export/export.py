"""Write the folder of a checkpoint, have a fresh process compare it, and only then give it its name."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks._writable import check_folder
from lightning_tricks.checkpoints.stream_weights import StreamedWeights, stream_weights
from lightning_tricks.commands.export.compare import (
    TEXT,
    ask_fresh_process,
    check_answer,
    check_tokens,
    fixed_batch,
    largest_difference,
    streamed_logits,
)
from lightning_tricks.commands.export.folder_files import transformers_package, write_settings, write_tokenizer
from lightning_tricks.commands.export.model_card import figures_of_run, model_card
from lightning_tricks.commands.export.weight_files import Entry, write_weights
from lightning_tricks.commands.generate import decoder_shape, newest_checkpoint
from lightning_tricks.data import SavedTokenizer, tokenizer_from_checkpoint
from lightning_tricks.data.saved_tokenizer import find_record
from lightning_tricks.models import DecoderConfig, fold_factors, hf_family, hf_weights
from lightning_tricks.models.hf_adapter import HFWeight

PREFIX = "decoder."  # of the decoder's weights in a LanguageModel
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_options(form: str, dtype: str | None, shard_size_gib: float) -> torch.dtype | None:
    """The dtype of an option; refuses values that `export` does not take."""
    if form == "gguf":
        raise UsageError(
            "export: format=gguf: it is not written here: give hf, and convert that folder with the "
            "convert_hf_to_gguf.py of llama.cpp, which refuses tokenizers that it does not know"
        )
    if form != "hf":
        raise UsageError(f"export: format={form}: give hf")
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"export: dtype={dtype}: give one of {', '.join(_DTYPES)}, or leave it out")
    if not shard_size_gib > 0:
        raise UsageError(f"export: shard_size_gib={shard_size_gib:g}: give a number above 0")
    return None if dtype is None else _DTYPES[dtype]


def export(ckpt_path: str, output: Path, average: str | None, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Write `output`; see the command's help for the arguments.

    Raises:
        UsageError: `output` exists; no checkpoint, or one of another module; a decoder or a tokenizer that no family of
            transformers can express; a folder that transformers loads otherwise.
    """
    if output.exists():
        raise UsageError(f"export: output={output} exists: name another folder, or remove it first")
    check_folder("export: output", output.absolute().parent)
    path = newest_checkpoint() if ckpt_path == "last" else Path(ckpt_path)
    source = stream_weights(path, average)
    config, base = decoder_shape(source.rest, path)
    family = hf_family(config)
    factor = fold_factors(config, base)
    record = find_record(dict(source.rest))
    tokenizer = None if record is None else _tokenizer(source, record)
    transformers_package()  # before minutes of writing
    staging = output.with_name(f".{output.name}.exporting")
    if staging.exists():
        shutil.rmtree(staging)  # of an export to `output` that was killed: no other program gives this hidden name
    staging.mkdir(parents=True)
    try:
        weights = _Weights(source, config, factor, dtype)
        entries = weights.entries()
        files = write_weights(entries, staging, file_bytes)
        parameters, word = sum(torch.Size(entry.shape).numel() for entry in entries), weights.dtype_word()
        print(f"{path}: {len(entries)} tensors, {parameters:,} parameters, as {family.class_name} in {word}")
        stored = entries[0].dtype
        write_settings(config, stored, None if tokenizer is None else tokenizer.eot_id, staging)
        if tokenizer is None or record is None:
            print("no tokenizer: the checkpoint holds none, as its data knew none: transformers gets token ids alone")
        else:
            write_tokenizer(record, tokenizer, config.max_seq_len, staging)
        compared = _compare(staging, weights, base, tokenizer)
        print(compared)
        card = model_card(
            output.name,
            family.class_name,
            parameters,
            word,
            source.rest,
            figures_of_run(path, int(source.rest.get("global_step", 0))),
            average=average,
            has_tokenizer=tokenizer is not None,
            compared=compared,
        )
        (staging / "README.md").write_text(card, encoding="utf-8")
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)  # made above, by this process
        raise
    size = sum(file.stat().st_size for file in (output / staged.name for staged in files))
    print(f"{output}: {size / 2**30:,.3f} GiB of weights in {len(files)} file{'s' * (len(files) != 1)}")


def _tokenizer(source: StreamedWeights, record: dict[str, Any]) -> SavedTokenizer:
    try:
        return tokenizer_from_checkpoint(dict(source.rest))
    except Exception as error:  # tokenizers raises bare Exception
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"export: the tokenizer {record.get('name')!r} of {source.path} is none of the tokenizers library, which "
            f"Hugging Face needs ({reason})"
        ) from None


class _Weights:
    """The decoder's weights of a checkpoint, as they are trained and as they are written."""

    def __init__(
        self,
        source: StreamedWeights,
        config: DecoderConfig,
        factor: Callable[[str], float],
        dtype: torch.dtype | None,
    ) -> None:
        self.source, self.config, self.factor, self.dtype = source, config, factor, dtype
        self.shapes = {
            name.removeprefix(PREFIX): shape for name, shape in source.shapes.items() if name.startswith(PREFIX)
        }
        # a weight of 16 bits that is multiplied or converted is rounded
        self.rounded = any(
            self._target(name) != torch.float32 and (factor(name) != 1.0 or self._target(name) != self.shapes[name][1])
            for name in self.shapes
        )

    def trained(self, name: str) -> Tensor:
        """A weight as the checkpoint has it."""
        return self.source.read(PREFIX + name)

    def written(self, name: str) -> Tensor:
        """A weight as it is written: with muP's factor, in the dtype of the files."""
        tensor, factor = self.trained(name), self.factor(name)
        return (tensor if factor == 1.0 else tensor.float() * factor).to(self._target(name))

    def _target(self, name: str) -> torch.dtype:
        return self.dtype or self.shapes[name][1]

    def dtype_word(self) -> str:
        """The dtypes of the files."""
        return " and ".join(sorted({str(self._target(name)).removeprefix("torch.") for name in self.shapes}))

    def entries(self) -> list[Entry]:
        """What is written, with Hugging Face's names."""
        weights = hf_weights(self.config)
        named = {part for weight in weights for part in weight.parts} | {"head.weight"}
        for name in named ^ (self.shapes.keys() | {"head.weight"}):
            raise UsageError(
                f"{self.source.path}: '{PREFIX}{name}' is not in both of its weights and its decoder_config"
            )
        found = []
        for weight in weights:
            dtype = self._target(weight.parts[0]) if weight.parts else self._target("embed.weight")
            found.append(Entry(weight.name, weight.shape, dtype, partial(self._build, weight, dtype)))
        return found

    def _build(self, weight: HFWeight, dtype: torch.dtype) -> Tensor:
        return weight.build(self.written).to(dtype)


def _compare(staging: Path, weights: _Weights, base: DecoderConfig | None, tokenizer: SavedTokenizer | None) -> str:
    """One sentence on what a fresh process found; see `compare`."""
    config, input_ids = weights.config, fixed_batch(weights.config)
    answer = ask_fresh_process(staging, input_ids, None if tokenizer is None else TEXT)
    trained = streamed_logits(config, base, weights.trained, input_ids)
    expected = streamed_logits(config, None, weights.written, input_ids) if weights.rounded else trained
    distance = check_answer(answer, expected, config.tie_embeddings)
    rows, length = input_ids.shape
    line = (
        f"Logits of {rows} x {length} tokens in a fresh process with transformers alone differ from the decoder's by "
        f"at most {distance:.1e}, where the largest is {expected.abs().max().item():.2f}"
    )
    if weights.rounded:
        line += (
            f"; rounding to {weights.dtype_word()} changed them by up to {largest_difference(expected, trained)[0]:.1e}"
        )
    if tokenizer is not None:
        line += f"; {check_tokens(answer, tokenizer)} token ids of a sample are the same"
    return line + "."
