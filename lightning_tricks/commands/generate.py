"""`generate`: continue a text with a trained model. Needs its checkpoint and nothing else: no recipe and no data."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import check_run_folder
from lightning_tricks._core.quote import printable_lines, say
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.check_checkpoint import verify_checkpoint
from lightning_tricks.checkpoints.find_checkpoint import newest_whole
from lightning_tricks.checkpoints.open_checkpoint import WEIGHTS, open_checkpoint
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_json, check_files, write_json
from lightning_tricks.data import SavedTokenizer, tokenizer_from_checkpoint
from lightning_tricks.mixins._plain_settings import from_plain
from lightning_tricks.mixins.optimizer_mixin import MUP_KEY
from lightning_tricks.models import GPT2, Decoder, DecoderConfig, Llama, Sampling
from lightning_tricks.models import generate as generate_tokens
from lightning_tricks.models.attention import RotaryPositions
from lightning_tricks.optim import MuP

DEFAULT_NEW_TOKENS = 200
_DEPTH = 4  # folders above `checkpoints` that `last` looks through: runs/NAME/version_N
_FAMILIES: dict[str, type[DecoderConfig]] = {"Llama": Llama, "GPT2": GPT2}


def run(args: list[str]) -> None:
    """Print the prompt and its continuation, token by token."""
    options = _parse(args)
    check_files("generate", options)
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    _, decoder, tokenizer, device = trained_model(options.ckpt_path, options.average)
    prompt = tokenizer.encode(options.prompt)
    if not prompt and tokenizer.eot_id is None:
        raise UsageError("generate: prompt='': the tokenizer has no end-of-text token to start from; give a text")
    prompt = prompt or [tokenizer.eot_id or 0]
    longest = decoder.config.max_seq_len
    if len(prompt) >= longest:
        raise UsageError(
            f"generate: prompt: its {len(prompt)} tokens leave no room in the model's max_seq_len={longest}: shorten it"
        )
    count = options.max_new_tokens or min(DEFAULT_NEW_TOKENS, longest - len(prompt))
    generator = torch.Generator(device).manual_seed(options.seed)
    rows = torch.tensor([prompt] * options.samples, device=device)
    tokens = generate_tokens(decoder, rows, count, sampling, generator)
    continuations = _texts(tokens, prompt, options.samples, tokenizer)
    if options.json == "-":
        *_, texts = continuations
    elif options.samples == 1:
        shown = ""
        for (text,) in continuations:
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character whose last bytes are still to come
                print(_shown(text[len(shown) :]), end="", flush=True)
                shown = text
        print(_shown(text[len(shown) :]))
        texts = [text]
    else:
        *_, texts = continuations
        for number, text in enumerate(texts):
            print(f"--- sample {number}\n{_shown(text)}")
    write_json(options.json, {"prompt": options.prompt, "samples": texts})


def _parse(args: list[str]) -> argparse.Namespace:
    parser = CommandParser(
        "generate",
        description="Continue a text with the model of a checkpoint, which holds its architecture and its tokenizer. "
        "Runs on the GPU if there is one, in the number format of the saved weights.",
    )
    parser.add_argument(
        "--ckpt_path", required=True, help="a file, or a folder of shards; last: the newest below this folder"
    )
    parser.add_argument("--average", help="use this average in place of the weights: ema, tail_average")
    parser.add_argument("--prompt", default="", help="the text to continue; empty (the default): a document's start")
    add_json(parser)
    parser.add_argument("--max_new_tokens", type=int, help=f"default: {DEFAULT_NEW_TOKENS}, or as many as fit")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the most likely token; default %(default)s")
    parser.add_argument("--top_k", type=int, help="draw among the k most likely tokens only; default: among all")
    top_p = "draw among the most likely tokens that together reach this probability; default: among all"
    parser.add_argument("--top_p", type=float, default=1.0, help=top_p)
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers; default %(default)s")
    parser.add_argument("--samples", type=int, default=1, help="number of continuations; default %(default)s")
    options = parser.parse_args(args)
    for name in ("max_new_tokens", "samples"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"generate: {name}={value}: give at least 1")
    if not 0 <= options.seed < 2**63:
        raise UsageError(f"generate: seed={options.seed}: give a number from 0 to 2**63 - 1")
    return options


class TrainedModel(NamedTuple):
    """The model of a checkpoint, ready to run.

    Args:
        path: of the checkpoint.
        decoder: in eval mode, in the number format of the saved weights.
        tokenizer: with which it was trained.
        device: of the decoder, the GPU if there is one.
    """

    path: Path
    decoder: Decoder
    tokenizer: SavedTokenizer
    device: torch.device


def trained_model(ckpt_path: str, average: str | None = None) -> TrainedModel:
    """Open a checkpoint whose model shall run.

    Args:
        ckpt_path: a file, a folder of shards, or `last`: see `newest_checkpoint`.
        average: name of an average to take in place of the weights.

    Raises:
        UsageError: the checkpoint is damaged, of another module, or holds no tokenizer or no such average.
    """
    newest = ckpt_path == "last"
    path = newest_checkpoint() if newest else local_copy(ckpt_path)
    checkpoint = open_checkpoint(path, parts=WEIGHTS, weights_only=True, average=average, verify=not newest)
    decoder, tokenizer = decoder_from_checkpoint(checkpoint, path), tokenizer_from_checkpoint(checkpoint)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return TrainedModel(path, decoder.to(device), tokenizer, device)


def newest_checkpoint() -> Path:
    """The newest whole checkpoint below the working folder, in folders `checkpoints` as runs make them.

    Raises:
        UsageError: there is none.
    """
    folders = [folder for depth in range(_DEPTH) for folder in Path().glob("*/" * depth + "checkpoints")]
    for folder in folders:
        check_run_folder(Path(), folder)

    found = newest_whole(folders, verify_checkpoint)
    for line in found.passed_over:
        say(f"ckpt_path=last: skipped: {line}", file=sys.stderr)
    if found.chosen is None:
        raise UsageError(
            f"ckpt_path=last: no complete checkpoint in {Path.cwd()} or the runs below it: give --ckpt_path FILE"
        )
    say(f"ckpt_path=last: {found.chosen.shown_path}", file=sys.stderr)  # the text alone goes to stdout
    return found.chosen.place


def _shown(text: str) -> str:
    """What a model has written; on a terminal without escape sequences, which it may have learned."""
    return "\t".join(map(printable_lines, text.split("\t"))) if sys.stdout.isatty() else text


def decoder_from_checkpoint(checkpoint: dict[str, Any], path: Any = "the checkpoint") -> Decoder:
    """The decoder of a LanguageModel's checkpoint, on the CPU, with the weights in the number format of the file.

    Args:
        checkpoint: as `torch.load` or `open_checkpoint` returns it.
        path: its name in an error.

    Raises:
        UsageError: the checkpoint is of another module.
    """
    config, base = decoder_shape(checkpoint, path)
    prefix = "decoder."
    weights = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
    try:
        return filled_decoder(config, base, weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise UsageError(f"{path}: its weights are not those of its decoder_config ({reason})") from None


def filled_decoder(config: DecoderConfig, base: DecoderConfig | None, weights: Mapping[str, Tensor]) -> Decoder:
    """A decoder on the CPU, in eval mode, that holds these very tensors."""
    with torch.device("meta"):
        decoder = Decoder(config, base)
    decoder.load_state_dict(weights, assign=True)
    if isinstance(decoder.positions, RotaryPositions):  # its tables are not saved
        decoder.positions.to_empty(device="cpu").reset_parameters()
    return decoder.eval()


def decoder_shape(
    checkpoint: Mapping[str, Any], path: Any = "the checkpoint"
) -> tuple[DecoderConfig, DecoderConfig | None]:
    """The shape of a LanguageModel's decoder, and that of its base model if it was trained with muP.

    Raises:
        UsageError: the checkpoint is of another module.
    """
    fields = dict(checkpoint.get("decoder_config") or {})
    family = _FAMILIES.get(str(fields.pop("class", "")))
    if family is None:
        raise UsageError(
            f"{path} holds no decoder_config of a Llama or GPT2, so it is not of a LanguageModel: write text with your "
            "own module's method"
        )
    config, mup = family(**fields), from_plain(checkpoint.get(MUP_KEY), MuP, "mup")
    return config, None if mup is None else mup.base_config(config)


def _texts(tokens: Iterable[Tensor], prompt: list[int], samples: int, tokenizer: SavedTokenizer) -> Iterator[list[str]]:
    """The text of each sample, prompt included, after each further token; ends where all documents have ended."""
    ids, going = [[*prompt] for _ in range(samples)], set(range(samples))
    for chosen in tokens:
        for index, token in enumerate(chosen.tolist()):
            if token == tokenizer.eot_id:
                going.discard(index)
            elif index in going:
                ids[index].append(token)
        yield [tokenizer.decode(row) for row in ids]
        if not going:
            return
