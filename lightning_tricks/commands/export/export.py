"""Write the folder of a checkpoint, have a fresh process compare it, and only then give it its name."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import printable, say
from lightning_tricks._host.writable import check_folder
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.load_weights import StreamedWeights, stream_weights
from lightning_tricks.checkpoints.write_file import is_locked, locked
from lightning_tricks.commands.export.folder_files import (
    Entry,
    transformers_package,
    write_settings,
    write_tokenizer,
    write_weights,
)
from lightning_tricks.commands.export.gguf_file import (
    FILE,
    HEAD,
    GGUFVocabulary,
    gguf_architecture,
    gguf_package,
    gguf_vocabulary,
    gguf_weights,
    stays_fp32,
    with_llama_cpp_rows,
    write_gguf,
)
from lightning_tricks.commands.export.model_card import (
    figures_of_run,
    llama_cpp_target,
    model_card,
    transformers_target,
)
from lightning_tricks.commands.export.verify_export import (
    TEXT,
    ask_fresh_process,
    check_answer,
    check_tokens,
    fixed_batch,
    largest_difference,
    logits_in_fp32,
)
from lightning_tricks.commands.generate import decoder_shape, newest_checkpoint
from lightning_tricks.data import SavedTokenizer, tokenizer_from_checkpoint
from lightning_tricks.data.tokenizer import find_record
from lightning_tricks.logs.table import size_text
from lightning_tricks.models import DecoderConfig, fold_factors, hf_family, hf_weights
from lightning_tricks.models.hf_adapter import HFWeight

PREFIX = "decoder."  # of the decoder's weights in a LanguageModel
FILE_BYTES = 5 * 2**30  # of weights at most: small enough for a download that breaks off
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Format:
    """How the weights stand in one format, and how it is read again.

    Args:
        weights: the tensors of a decoder.
        readers: packages that the fresh process has.
        order: gives a tensor, by the decoder's name and with its settings, in the format's order of rows.
        stays_fp32: whether a tensor of a name and shape is fp32 whatever `dtype` says.
    """

    weights: Callable[[DecoderConfig], list[HFWeight]]
    readers: str
    order: Callable[[str, Tensor, DecoderConfig], Tensor] = lambda name, tensor, config: tensor
    stays_fp32: Callable[[str, Sequence[int]], bool] = lambda name, shape: False


_FORMATS = {
    "hf": Format(hf_weights, "transformers"),
    "gguf": Format(gguf_weights, "transformers and gguf", with_llama_cpp_rows, stays_fp32),
}


def export(ckpt_path: str, output: Path, form: str, average: str | None, dtype: str | None) -> dict[str, Any]:
    """Write `output`, and give its figures for JSON; see the command's help for the arguments.

    Raises:
        UsageError: `output` exists, or another process is writing it; no checkpoint, or one of another module; a
            decoder or a tokenizer that no family of transformers, or architecture of llama.cpp, can express; a folder
            that transformers loads otherwise.
    """
    if os.path.lexists(output):
        raise UsageError(f"export: output={output} exists: name another folder, or remove it first")
    check_folder("export: output", output.parent)
    path = newest_checkpoint() if ckpt_path == "last" else local_copy(ckpt_path)
    source = stream_weights(path, average)
    config, base = decoder_shape(source.rest, path)
    family = hf_family(config)
    factor = fold_factors(config, base)
    record = find_record(dict(source.rest))
    tokenizer = None if record is None else _tokenizer(source, record)
    transformers_package()  # before minutes of writing
    vocabulary = _vocabulary(path, config, tokenizer) if form == "gguf" else None
    with _staged(output) as staging:
        weights = _Weights(source, config, factor, _DTYPES.get(dtype or ""), _FORMATS[form])
        entries = weights.entries()
        parameters, word = sum(torch.Size(entry.shape).numel() for entry in entries), weights.dtype_word()
        if vocabulary is not None:
            name, target = f"llama.cpp's {gguf_architecture(config)}", llama_cpp_target(gguf_architecture(config))
            files = [staging / FILE]
            write_gguf(entries, config, vocabulary, printable(output.name), files[0])
        else:
            name, target = family.class_name, transformers_target(family.class_name, tokenizer is not None)
            files = write_weights(entries, staging, FILE_BYTES)
            write_settings(config, entries[0].dtype, None if tokenizer is None else tokenizer.eot_id, staging)
            if tokenizer is not None and record is not None:
                write_tokenizer(record, tokenizer, config.max_seq_len, staging)
        say(f"{path}: {len(entries)} tensors, {parameters:,} parameters, as {name} in {word}")
        if tokenizer is None:
            print("no tokenizer: the checkpoint holds none, as its data knew none: transformers gets token ids alone")
        distance, compared = _compare(staging, weights, base, tokenizer)
        print(compared)
        figures = figures_of_run(path, int(source.rest.get("global_step", 0)))
        of_model = (output.name, target, parameters, word, source.rest, figures)
        card = model_card(*of_model, average=average, compared=compared)
        (staging / "README.md").write_text(card, encoding="utf-8")
    size = sum(file.stat().st_size for file in (output / staged.name for staged in files))
    say(f"{output}: {size_text(size)} of weights in {len(files)} file{'s' * (len(files) != 1)}")
    counts = {"tensors": len(entries), "parameters": parameters, "weights_bytes": size, "dtype": word}
    return {"folder": str(output), "checkpoint": str(path), **counts, "largest_logit_difference": distance}


@contextmanager
def _staged(output: Path) -> Iterator[Path]:
    """Give a hidden folder to write to, which gets the name `output` at the end; an error inside deletes it."""
    staging = output.with_name(f".{output.name}.exporting")
    if is_locked(staging):
        raise UsageError(f"export: output={output}: another process is writing this folder: name another one")
    if staging.is_symlink():
        raise UsageError(f"export: output={output}: {staging} is a link: remove it, or name another folder")
    if staging.exists():
        shutil.rmtree(staging)  # of an export to `output` that was killed: no other program gives this hidden name
    staging.mkdir(parents=True)
    with locked(staging):
        try:
            yield staging
            staging.rename(output)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)  # made above, by this process
            raise


def _vocabulary(path: Path, config: DecoderConfig, tokenizer: SavedTokenizer | None) -> GGUFVocabulary:
    """What a GGUF file says about the tokenizer; refuses what llama.cpp cannot express before minutes of writing."""
    gguf_package()
    gguf_architecture(config)
    if tokenizer is None:
        raise UsageError(f"export: format=gguf: {path} holds no tokenizer, which a GGUF file needs: give hf")
    return gguf_vocabulary(tokenizer, config.vocab_size)


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
    """The decoder's weights of a checkpoint, as they are trained and as a format has them."""

    def __init__(
        self,
        source: StreamedWeights,
        config: DecoderConfig,
        factor: Callable[[str], float],
        dtype: torch.dtype | None,
        form: Format,
    ) -> None:
        self.source, self.config, self.factor, self.dtype, self.form = source, config, factor, dtype, form
        self.shapes = {
            name.removeprefix(PREFIX): shape for name, shape in source.shapes.items() if name.startswith(PREFIX)
        }
        self._latest: tuple[str, Tensor] | None = None
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
        shape, saved = self.shapes[name]
        return torch.float32 if self.form.stays_fp32(name, shape) else self.dtype or saved

    def dtype_word(self) -> str:
        """The dtypes of the files."""
        return " and ".join(sorted({str(self._target(name)).removeprefix("torch.") for name in self.shapes}))

    def entries(self) -> list[Entry]:
        """What is written, with the format's names."""
        weights = self.form.weights(self.config)
        named = {part for weight in weights for part in weight.parts} | {"head.weight"}
        for name in named ^ (self.shapes.keys() | {"head.weight"}):
            raise UsageError(
                f"{self.source.path}: '{PREFIX}{name}' is not in both of its weights and its decoder_config"
            )
        found = []
        for weight in weights:
            dtype = self._target(weight.parts[0] if weight.parts else "norm.weight")
            found.append(Entry(weight.name, weight.shape, dtype, partial(self._build, weight, dtype)))
        return found

    def _build(self, weight: HFWeight, dtype: torch.dtype) -> Tensor:
        def read(name: str) -> Tensor:
            if self._latest is None or self._latest[0] != name:  # a stack of experts is read once, not for each of them
                self._latest = name, self.form.order(name, self.written(name), self.config)
            return self._latest[1]

        return weight.build(read).to(dtype)

    def tied(self) -> bool:
        """Whether the format has one matrix for the embedding and the head."""
        return self.config.tie_embeddings and HEAD not in {entry.name for entry in self.entries()}


def _compare(
    staging: Path, weights: _Weights, base: DecoderConfig | None, tokenizer: SavedTokenizer | None
) -> tuple[float, str]:
    """The largest difference of logits that a fresh process found, and a sentence on it; see `verify_export`."""
    config, input_ids = weights.config, fixed_batch(weights.config)
    answer = ask_fresh_process(staging, input_ids, None if tokenizer is None else TEXT)
    trained = logits_in_fp32(config, base, weights.trained, input_ids)
    expected = logits_in_fp32(config, None, weights.written, input_ids) if weights.rounded else trained
    distance = check_answer(answer, expected, weights.tied())
    rows, length = input_ids.shape
    line = (
        f"Logits of {rows} x {length} tokens in a fresh process with {weights.form.readers} alone differ from the "
        f"decoder's by at most {distance:.1e}, where the largest is {expected.abs().max().item():.2f}"
    )
    if weights.rounded:
        line += (
            f"; rounding to {weights.dtype_word()} changed them by up to {largest_difference(expected, trained)[0]:.1e}"
        )
    if tokenizer is not None:
        line += f"; {check_tokens(answer, tokenizer)} token ids of a sample are the same"
    return distance, line + "."
