"""The gradient of a batch and of each of its documents, that of the batch without the document, and AdamW's updates.

Losses add up over tokens, so the gradient of the batch is the sum of the gradients of its documents, exactly: that of
one document is a backward pass in which the labels of all others are ignored. Sums of nats are added; a step's gradient
is their sum over the number of its tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._find_modules import clean_name
from lightning_tricks.commands.autopsy.documents import Document, joined
from lightning_tricks.data.batches import Batch

Gradient = list[Tensor]
Sums = Callable[[Batch], tuple[Tensor, Tensor]]  # nats and number of tokens of a batch
Update = Callable[[Gradient, float], Iterator[Tensor]]  # an optimizer's step from a gradient and its norm
Moments = tuple[Tensor, Tensor, int, Mapping[str, Any]]  # of one parameter, see AdamUpdate
_ADAM = ("AdamW", "Adam")
_ADAM_STATE = {"exp_avg", "exp_avg_sq", "step"}


@dataclass(frozen=True)
class BatchGradient:
    """The gradient of the whole batch."""

    nats: float  # summed loss
    tokens: int  # with a loss
    gradient: Gradient  # of the mean over the tokens, one tensor for each parameter
    norm: float
    left_out: frozenset[int]  # documents whose gradient is not finite, and which are in none of these values


@dataclass(frozen=True)
class DocumentEffect:
    """The effect of one document on its batch."""

    loss: float  # nats per token
    norm: float  # of the document's part of the batch's gradient: of its summed loss over the batch's tokens
    share: float  # of the batch's gradient norm; the shares of all documents add up to 1
    norm_without: float  # of the gradient of the batch's other documents
    cosine: float  # between the gradients with the document and without
    update_without: float | None = None  # norm of the optimizer's update without it; None where it is not computed
    update_change: float | None = None  # norm of the difference of the two updates, over that with the document


class Gradients:
    """Gradients of a module for the rows of one batch.

    Args:
        module: on its device, in fp32.
        sums: its loss.
        rows: of the batch, each of one row.
        documents: of the rows.
        rows_at_once: for the gradient of the whole batch.
    """

    def __init__(
        self, module: nn.Module, sums: Sums, rows: Sequence[Batch], documents: Sequence[Document], rows_at_once: int
    ) -> None:
        self.module, self.sums, self.rows, self.documents = module, sums, rows, documents
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.device = self.parameters[0].device
        self.rows_at_once = rows_at_once

    def of_batch(self) -> BatchGradient:
        """The gradient of the batch without documents whose own gradient is not finite."""
        found = self._of_batch(frozenset())
        if math.isfinite(found.norm):
            return found
        broken = (i for i, document in enumerate(self.documents) if not math.isfinite(norm(self._of(document)[1])))
        return self._of_batch(frozenset(broken))

    def _of_batch(self, left_out: frozenset[int]) -> BatchGradient:
        nats, gradient = self._sum(self._batches(left_out))
        tokens = sum(d.tokens for i, d in enumerate(self.documents) if i not in left_out)
        torch._foreach_div_(gradient, max(tokens, 1))
        return BatchGradient(nats, tokens, gradient, norm(gradient), left_out)

    def _batches(self, left_out: frozenset[int]) -> Iterator[Batch]:
        """The rows, some at once; of a row with a document that is left out, each other document alone."""
        split = {self.documents[index].row for index in left_out}
        rows = [row for index, row in enumerate(self.rows) if index not in split]
        for first in range(0, len(rows), self.rows_at_once):
            yield joined(rows[first : first + self.rows_at_once], self.device)
        for index, document in enumerate(self.documents):
            if document.row in split and index not in left_out:
                yield self._alone(document)

    def _alone(self, document: Document) -> Batch:
        return joined([document.alone(self.rows[document.row])], self.device)

    def _sum(self, batches: Iterable[Batch]) -> tuple[float, Gradient]:
        """Summed loss and its gradient."""
        self.module.zero_grad(set_to_none=True)
        nats = 0.0
        for batch in batches:
            loss, _ = self.sums(batch)
            loss.backward()
            nats += loss.item()
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.module.zero_grad(set_to_none=True)
        return nats, gradient

    def _of(self, document: Document) -> tuple[float, Gradient]:
        return self._sum([self._alone(document)])

    def effect(self, index: int, whole: BatchGradient, update: Update | None = None) -> DocumentEffect:
        """The effect of the document `index` on the batch; NaN for one whose gradient is not finite."""
        document = self.documents[index]
        nats, gradient = self._of(document)
        loss = nats / document.tokens
        if index in whole.left_out:
            return DocumentEffect(loss, math.nan, math.nan, whole.norm, math.nan)
        torch._foreach_div_(gradient, whole.tokens)
        own, share = norm(gradient), dot(gradient, whole.gradient) / whole.norm**2 if whole.norm else math.nan
        rest = whole.tokens - document.tokens
        if not rest:
            return DocumentEffect(loss, own, share, math.nan, math.nan)
        without = gradient  # in its memory: there is no third gradient
        torch._foreach_mul_(without, -1.0)
        torch._foreach_add_(without, whole.gradient)
        torch._foreach_mul_(without, whole.tokens / rest)
        norm_without = norm(without)
        both = whole.norm * norm_without
        cosine = dot(whole.gradient, without) / both if both else math.nan
        if update is None:
            return DocumentEffect(loss, own, share, norm_without, cosine)
        pairs = zip(update(whole.gradient, whole.norm), update(without, norm_without), strict=True)
        return DocumentEffect(loss, own, share, norm_without, cosine, *_update_change(pairs))


def _update_change(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Norm of the update without a document, and of its difference from that with it, relative to that."""
    sums = [torch.stack([a.square().sum(), b.square().sum(), (b - a).square().sum()]) for a, b in pairs]
    before, after, difference = (math.sqrt(math.fsum(column)) for column in torch.stack(sums).T.tolist())
    return after, difference / before if before else math.nan


def norm(gradient: Gradient) -> float:
    """L2 norm of all tensors together."""
    return math.sqrt(_total([part.square().sum() for part in gradient]))


def dot(one: Gradient, other: Gradient) -> float:
    """Scalar product of all tensors together."""
    return _total([(a * b).sum() for a, b in zip(one, other, strict=True)])


def _total(parts: list[Tensor]) -> float:
    """The sum, in float64 on the host: one transfer."""
    return math.fsum(torch.stack(parts).tolist()) if parts else 0.0


class AdamUpdate:
    """AdamW's next update of all parameters, after the recipe's clip: the part that depends on the data.

    In units of the learning rate, which may be 0 just now, and without the weight decay, which no document changes.

    Args:
        moments: of each parameter: `exp_avg`, `exp_avg_sq`, the number of steps done, and its group's settings.
        clip_val: the Trainer's `gradient_clip_val`; None or 0 for no clip.
        clip_algorithm: the Trainer's `gradient_clip_algorithm`: `value`, or by norm.
    """

    def __init__(self, moments: Sequence[Moments], clip_val: float | None, clip_algorithm: str | None) -> None:
        self.moments, self.clip_val, self.by_value = moments, clip_val, clip_algorithm == "value"

    def __call__(self, gradient: Gradient, norm: float) -> Iterator[Tensor]:
        """Each parameter's update from a gradient, one by one: all together would need the memory of a gradient."""
        limit = self.clip_val or math.inf
        factor = 1.0 if self.by_value else min(1.0, limit / (norm + 1e-6))
        for part, moments in zip(gradient, self.moments, strict=True):
            yield _update(moments, part.clamp(-limit, limit) if self.by_value else part * factor)


def _update(moments: Moments, gradient: Tensor) -> Tensor:
    mean, square, steps, group = moments
    (beta1, beta2), steps = group["betas"], steps + 1
    mean = mean.lerp(gradient, 1 - beta1) / (1 - beta1**steps)
    square = (beta2 * square + (1 - beta2) * gradient.square()) / (1 - beta2**steps)
    return group.get("lr_scale", 1.0) * mean / (square.sqrt() + group["eps"])


def moments_of(checkpoint: Mapping[str, Any], module: nn.Module) -> list[Moments] | None:
    """The moments of each trainable parameter, on its device in fp32.

    Returns:
        None where the checkpoint holds no plain state of AdamW or Adam for exactly these parameters.
    """
    states = checkpoint.get("optimizer_states") or []
    if len(states) != 1 or checkpoint.get("optimizer_class") not in _ADAM:
        return None
    found: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for group in states[0]["param_groups"]:
        for name, number in zip(group.get("param_names", ()), group["params"], strict=False):
            found[clean_name(name)] = states[0]["state"].get(number, {}), group
    moments: list[Moments] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        state, group = found.get(clean_name(name), ({"unknown": 0}, {}))
        if (state and set(state) != _ADAM_STATE) or group.get("amsgrad") or group.get("maximize"):
            return None
        mean, square = (
            state[key].to(parameter.device, torch.float32) if state else torch.zeros_like(parameter.data)
            for key in ("exp_avg", "exp_avg_sq")
        )
        moments.append((mean, square, int(state.get("step", 0)), group))
    return moments
