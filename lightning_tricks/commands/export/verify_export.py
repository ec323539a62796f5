"""Compare an exported folder with the checkpoint: logits and token ids of a process that has transformers alone."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands.generate import filled_decoder
from lightning_tricks.data import SavedTokenizer
from lightning_tricks.models import Decoder, DecoderConfig

ROWS, LENGTH = 2, 64  # of the fixed batch
TOLERANCE = 1e-4  # of the largest logit; two programs of one model in fp32 differed by up to 3e-6 of it
TEXT = (
    "def parse(text):\n    return [int(word) for word in text.split(',') if word]  # 1,234 words\n\n"
    '\tNaïve café, Ünïcödé: 你好, \N{GRINNING FACE}; "quotes", it\'s  3.14159e-05 of 100 %.\r\n   \n'
)


def fixed_batch(config: DecoderConfig) -> Tensor:
    """The same token ids for every export of one vocabulary, (ROWS, up to LENGTH)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (ROWS, min(LENGTH, config.max_seq_len)), generator=generator)


@torch.no_grad()
def logits_in_fp32(
    config: DecoderConfig, base: DecoderConfig | None, read: Callable[[str], Tensor], input_ids: Tensor
) -> Tensor:
    """Logits of `Decoder(config, base)`, whose weights `read` gives by their names; input_ids are (batch, length)."""
    with torch.device("meta"):
        names = Decoder(config, base).state_dict()
    return filled_decoder(config, base, {name: read(name).float() for name in names})(input_ids)


def ask_fresh_process(folder: Path, input_ids: Tensor, text: str | None) -> dict[str, Any]:
    """What a program of its own, `load_alone.py`, finds out about a folder.

    Raises:
        UsageError: transformers cannot load it, with the last line of its error.
    """
    with tempfile.TemporaryDirectory() as place:
        request, answer = Path(place, "request"), Path(place, "answer")
        torch.save({"input_ids": input_ids} | ({} if text is None else {"text": text}), request)
        # nothing is downloaded, and nothing of this process's folder is imported
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        script = Path(__file__).with_name("load_alone.py")
        command = [sys.executable, str(script), str(folder.resolve()), str(request), str(answer)]
        done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            reason = lines[-1].strip() if lines else f"exit code {done.returncode}"
            raise UsageError(f"export: transformers cannot load what was written ({reason}): nothing is kept")
        found: dict[str, Any] = torch.load(answer, weights_only=True)
        return found


def largest_difference(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest distance of two logits, and that distance in the largest logit; infinite where one is not finite."""
    distance = (found - expected).abs().max().item()
    if not (torch.isfinite(found).all() and torch.isfinite(expected).all()):
        distance = float("inf")
    return distance, distance / max(expected.abs().max().item(), 1e-30)


def check_answer(answer: dict[str, Any], expected: Tensor, tied: bool) -> float:
    """Refuse a folder in which transformers finds another model; returns the largest difference of the logits.

    Args:
        answer: of the fresh process.
        expected: the decoder's logits.
        tied: whether one matrix was written for the embedding and the head.

    Raises:
        UsageError: a weight that was not found or not used; a tie that is not that of the decoder; other logits.
    """
    if answer["wrong"]:
        raise UsageError(f"export: transformers found other weights ({answer['wrong'][0]}): nothing is kept")
    if answer["tied"] != tied:
        raise UsageError(f"export: transformers ties the head: {answer['tied']}, the decoder: {tied}: nothing is kept")
    if answer["logits"].shape != expected.shape:
        shapes = f"{tuple(answer['logits'].shape)} and {tuple(expected.shape)}"
        raise UsageError(f"export: logits of transformers and of the decoder are {shapes}: nothing is kept")
    distance, share = largest_difference(answer["logits"], expected)
    if not share <= TOLERANCE:
        raise UsageError(
            f"export: logits of transformers differ from the decoder's by {distance:.2e}, which is {share:.2e} of the "
            f"largest logit and above {TOLERANCE:g}: nothing is kept; the checkpoint is as it was"
        )
    return distance


def check_tokens(answer: dict[str, Any], saved: SavedTokenizer) -> int:
    """Refuse a folder whose tokenizer gives other ids, or another end of text; returns the number of ids compared.

    Raises:
        UsageError: the first difference.
    """
    ids = saved.encode(TEXT)
    if answer["ids"] != ids:
        pairs = zip([*answer["ids"], None], [*ids, None], strict=False)
        place = next(number for number, (theirs, ours) in enumerate(pairs) if theirs != ours)
        raise UsageError(
            f"export: transformers' tokenizer gives other ids than {saved.name!r}, the first at token {place} of a "
            "sample: it cannot express the tokenizer; nothing is kept"
        )
    if answer["eos"] != saved.eot_id:
        raise UsageError(
            f"export: the end of text is {answer['eos']} in transformers and {saved.eot_id} in the checkpoint: "
            "nothing is kept"
        )
    return len(ids)
