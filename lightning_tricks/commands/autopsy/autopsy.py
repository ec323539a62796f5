"""Rebuild the batch of one optimizer step, and rank its documents by how far each stands out."""

import math
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.load_weights import matched
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint
from lightning_tricks.commands.autopsy.documents import Document, documents_of, rows_of, samples_of_step
from lightning_tricks.commands.autopsy.gradients import AdamUpdate, Gradients, moments_of, norm
from lightning_tricks.commands.autopsy.report import SHOWN, RankedDocument, Report, suspicions, visible
from lightning_tricks.data.base import ShardData
from lightning_tricks.language_model import LanguageModel


def autopsy(
    module: Any,
    data: Any,
    checkpoint_path: str | Path,
    step: int,
    *,
    device: torch.device | str = "cpu",
    max_steps: int = -1,
    clip_val: float | None = None,
    clip_algorithm: str | None = None,
    weights_only: bool | None = None,
) -> Report:
    """What each document of a step's batch did to the step, in one process, whatever number the run had.

    The samples are those that all ranks and micro-batches of the step took together, by the record of the
    global batch in the checkpoint, or in a later one beside it. Everything is computed in fp32.

    Args:
        module: a LanguageModel that is not built yet; it gets the checkpoint's weights.
        data: the TextData or TokenData of the run.
        checkpoint_path: file or folder of shards; its step need not be the one before `step`.
        step: as the logs count: the first is step 0, and step N begins with the weights of a checkpoint of step N.
        device: to compute on.
        max_steps: of the run, -1 for no end.
        clip_val: the Trainer's `gradient_clip_val`, for AdamW's update.
        clip_algorithm: the Trainer's `gradient_clip_algorithm`.
        weights_only: as in `torch.load`, of the checkpoint.

    Raises:
        UsageError: another kind of module or data; a checkpoint without the data's state, or of other data; a step
            that the run has not; no whole checkpoint.
    """
    _check_kinds(module, data)
    path = Path(checkpoint_path)
    checkpoint = open_checkpoint(path, weights_only=weights_only)
    data.prepare_data()
    data.setup("fit")
    asked = samples_of_step(data, checkpoint, path, step, max_steps)
    _build(module, data, checkpoint, path, torch.device(device))
    moments = moments_of(checkpoint, module)
    update = None if moments is None else AdamUpdate(moments, clip_val, clip_algorithm)
    rows = data.training_rows()
    samples, batches = rows_of(rows, asked.runs)
    documents = documents_of(rows, samples, batches, data.eot_id)
    gradients = Gradients(module, module.token_sums, batches, documents, data.micro_batch_size)
    whole = gradients.of_batch()
    effects = [gradients.effect(index, whole, update) for index in range(len(documents))]
    scores = suspicions([e.loss for e in effects], [e.norm for e in effects], [d.tokens for d in documents])
    files = data.source_files([document.token for document in documents])
    ranked = [
        RankedDocument(
            document, effect, score, _text(data, document), data.streams["train"].place(document.token), file
        )
        for document, effect, score, file in zip(documents, effects, scores, files, strict=True)
    ]
    ranked.sort(key=lambda each: each.suspicion.score, reverse=True)
    updated = None if update is None else norm(list(update(whole.gradient, whole.norm)))
    loss = whole.nats / whole.tokens if whole.tokens else math.nan
    done = int(checkpoint.get("global_step", 0))
    return Report(step, asked, whole.tokens, loss, whole.norm, updated, path, done, ranked)


def _check_kinds(module: Any, data: Any) -> None:
    """Refuse what has no sum of nats, or no sample positions."""
    if not isinstance(module, LanguageModel):
        raise UsageError(
            f"autopsy: model={type(module).__name__} is no LanguageModel, whose decoder gives the loss of each document"
        )
    if not module.automatic_optimization:
        raise UsageError(f"autopsy: {type(module).__name__} steps its optimizers itself, so its steps have no batch")
    if not isinstance(data, ShardData):
        kind = "none" if data is None else type(data).__name__
        raise UsageError(f"autopsy: data={kind}: its batches have no sample positions; TextData's and TokenData's have")


def _build(module: Any, data: Any, checkpoint: Any, path: Path, device: torch.device) -> None:
    """Build the decoder on the device and load the checkpoint's weights, as fp32."""
    if "decoder_config" not in checkpoint:
        raise UsageError(f"ckpt_path={path}: it holds no decoder, so it is not of a LanguageModel")
    module.compile_blocks = False  # each document has another length, and would be compiled anew
    with device:
        module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(matched(module, checkpoint["state_dict"], path), strict=False)  # names have been compared
    module.eval()
    data.check_ids(module.config.vocab_size)


def _text(data: Any, document: Document) -> str:
    """The beginning of a document; its token ids where no tokenizer is known."""
    ids = document.ids[:SHOWN].tolist()
    if data.tokenizer is None:
        return "token ids " + visible(" ".join(map(str, ids)))
    text = data.tokenizer.decode(ids, skip_special_tokens=False)
    return visible(text) + ("..." if len(text) <= SHOWN and document.tokens > SHOWN else "")
