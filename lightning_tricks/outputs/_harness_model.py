"""A causal model as lm_eval asks it: log-probabilities of given texts, and texts up to a stop word.

Needs lm_eval (EleutherAI's lm-evaluation-harness), so it is imported only where tasks are run. Every rank is given all
requests and computes its share of them, in the same number of forward passes, which sharded weights need; all ranks
return all answers. lm_eval itself sees one process.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lm_eval import evaluate as lm_eval_evaluate
from lm_eval import simple_evaluate
from lm_eval.api import task as lm_eval_task
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.random_state import gather
from lightning_tricks._core.replaced import replaced
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks.models import Sampling
from lightning_tricks.models.generate import ROW_MULTIPLE, continue_rows
from lightning_tricks.outputs._text_model import TextModel

_POSITIONS = 1024  # whose log-probabilities over the whole vocabulary are in memory at once, in fp32
Pair = tuple[list[int], list[int]]  # the context's tokens and those to score
Given = TypeVar("Given")
Answer = TypeVar("Answer")


def score(model: TextModel, pairs: Sequence[Pair], max_length: int) -> list[tuple[float, bool]]:
    """Log-probability of each continuation after its context, in nats, and whether it is the most likely one.

    Args:
        model: computes one batch of all pairs.
        pairs: token ids, at least one each; a context that does not fit is cut at its beginning.
        max_length: tokens in the longest row; no continuation is longer.
    """
    inputs = [(context + continuation)[-(max_length + 1) :][:-1] for context, continuation in pairs]
    width = min(-(-max(map(len, inputs)) // ROW_MULTIPLE) * ROW_MULTIPLE, max_length)
    rows = torch.zeros(len(pairs), width, dtype=torch.int64)
    for row, ids in zip(rows, inputs, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    counts = [len(continuation) for _, continuation in pairs]
    places = [len(ids) - count + i for ids, count in zip(inputs, counts, strict=True) for i in range(count)]
    of_row = torch.arange(len(pairs)).repeat_interleave(torch.tensor(counts)).to(model.device)
    positions = torch.tensor(places, device=model.device)
    targets = torch.tensor([token for _, tokens in pairs for token in tokens], device=model.device)
    logits, parts = model.logits_of(rows.to(model.device)), []
    for row, position, target in zip(*(t.split(_POSITIONS) for t in (of_row, positions, targets)), strict=True):
        found = logits[row, position].float().log_softmax(-1)
        chosen = found.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        parts.append(torch.stack([chosen, (found.argmax(-1) == target).float()]))
    chosen, likeliest = torch.cat(parts, dim=1).cpu().double()  # one transfer for a batch
    sums = zip(chosen.split(counts), likeliest.split(counts), strict=True)
    return [(float(nats.sum()), bool(hits.all())) for nats, hits in sums]


class HarnessModel(TemplateLM):
    """A `TextModel` for `lm_eval.simple_evaluate(model=...)`.

    Args:
        model: whose forward passes need no gradient: call it under `torch.no_grad()`.
        batch_size: rows in a forward pass of one process.
        max_length: tokens in the longest row; None: as the model says.

    Raises:
        UsageError: the model does not say its longest row; there is no end-of-text token.
    """

    def __init__(self, model: TextModel, batch_size: int = 8, max_length: int | None = None) -> None:
        super().__init__()
        if (longest := max_length or model.max_length) is None:
            raise UsageError("max_length: the model does not say its longest row: give it")
        if model.max_length is not None and longest > model.max_length:
            raise UsageError(f"max_length={longest}: the model's longest row is {model.max_length}")
        if model.end is None:
            raise UsageError("the tokenizer has no end-of-text token, which stands before a text without context")
        self.model, self.batch_size, self.max_length, self._end = model, batch_size, longest, model.end

    @property
    def eot_token_id(self) -> int:
        """The token before a text without context."""
        return self._end

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text."""
        return self.model.encode(string, special=add_special_tokens is not False)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-probability and greediness of (context, continuation), see lm_eval; without its bar of tokenizing."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[Any]:
        """The same of token ids."""
        windows = [self._windows(context, continuation) for _, context, continuation in requests]
        return self._scores(windows)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-probability of whole texts, in windows side by side as lm_eval cuts them."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return [nats for nats, _ in self._scores([self._rolling(self._end, tokens) for tokens in texts])]

    def _windows(self, context: list[int], continuation: list[int]) -> list[Pair]:
        """The pair itself, or windows of a continuation that is longer than a row."""
        if len(continuation) <= self.max_length:
            return [(context, continuation)]
        return self._rolling(context[-1], continuation)

    def _rolling(self, before: int, tokens: list[int]) -> list[Pair]:
        return [make_disjoint_window(one) for one in get_rolling_token_windows(tokens, before, self.max_length, 1)]

    def _scores(self, windows: list[list[Pair]]) -> list[tuple[float, bool]]:
        """The sum over the windows of each text, and whether all of them are greedy."""
        flat = [(number, pair) for number, pairs in enumerate(windows) for pair in pairs]
        flat.sort(key=lambda one: -len(one[1][0]) - len(one[1][1]))
        sums, greedy = [0.0] * len(windows), [True] * len(windows)
        for (number, _), (nats, likeliest) in zip(
            flat, self._answers_of_all_ranks(flat, self._score_batch), strict=True
        ):
            sums[number] += nats
            greedy[number] &= likeliest
        return list(zip(sums, greedy, strict=True))

    def _score_batch(self, number: int, batch: list[tuple[int, Pair]]) -> list[tuple[float, bool]]:
        return score(self.model, [pair for _, pair in batch], self.max_length)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Texts up to a stop word, an end-of-text token or the number of tokens that the task names.

        The row is computed anew for each token. A prompt and its text share `max_length`: the text gets at most half of
        it, and the beginning of a prompt that does not fit is left out.
        """
        answers: dict[int, str] = {}
        settings = [normalize_gen_kwargs(request.args[1]) for request in requests]
        for setting in {repr(setting): setting for setting in settings}.values():  # rows of one batch end together
            count = min(setting["max_gen_toks"], self.max_length // 2)
            prompts = [
                (number, self.tok_encode(request.args[0])[-(self.max_length - count) :] or [self._end])
                for number, request in enumerate(requests)
                if settings[number] == setting
            ]
            prompts.sort(key=lambda one: -len(one[1]))
            texts = self._answers_of_all_ranks(prompts, partial(self._continue, setting=setting, count=count))
            answers |= {number: text for (number, _), text in zip(prompts, texts, strict=True)}
        return [answers[number] for number in range(len(requests))]

    def _continue(
        self, number: int, batch: list[tuple[int, list[int]]], setting: Mapping[str, Any], count: int
    ) -> list[str]:
        stops = [stop for stop in setting["until"] if stop]
        sampling = Sampling(
            setting["temperature"] if setting["do_sample"] else 0.0, setting.get("top_k"), setting.get("top_p", 1.0)
        )

        def text_of(ids: list[int]) -> tuple[str, bool]:
            """The text before the first stop, and whether there was one."""
            kept = ids[: ids.index(self._end)] if self._end in ids else ids
            text = self.model.decode(kept)
            cut = min((text.index(stop) for stop in stops if stop in text), default=None)
            return text[:cut], cut is not None or len(kept) < len(ids)

        def ended(rows: list[list[int]]) -> bool:
            return all(gather(all(text_of(ids)[1] for ids in rows)))

        generator = torch.Generator(self.model.device).manual_seed(number)
        prompts = [prompt for _, prompt in batch]
        rows = continue_rows(self.model.logits_of, prompts, count, sampling, generator, self.max_length, ended)
        return [text_of(ids)[0] for ids in rows]

    def _answers_of_all_ranks(
        self, requests: Sequence[Given], answer: Callable[[int, list[Given]], list[Answer]]
    ) -> list[Answer]:
        """The answers to all requests: batches by turns to the ranks, each of which computes equally many."""
        size = self.batch_size
        batches = [list(requests[start : start + size]) for start in range(0, len(requests), size)]
        together = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        rounds = -(-len(batches) // world)
        own = [answer(n, batches[min(n, len(batches) - 1)]) for n in range(rank, rounds * world, world)]
        everyones = gather(own)
        return [one for n in range(len(batches)) for one in everyones[n % world][n // world]]


class Tasks:
    """Tasks of lm_eval, loaded once: their data are read, from the network too, before anything is computed.

    Args:
        names: of tasks and groups, such as `arc_easy`, or paths of YAML files that define one.
        include_path: folder with definitions of more tasks.
        num_fewshot: examples before each question; None: as each task says. Tasks that say 0 keep it.

    Raises:
        UsageError: no such task; its data cannot be read.
    """

    def __init__(self, names: Sequence[str], include_path: str | None = None, num_fewshot: int | None = None) -> None:
        self.names = list(names)
        if include_path is not None and not Path(include_path).is_dir():
            raise UsageError(f"include_path={include_path!r}: there is no such folder")
        only_files = include_path is None and all(Path(name).is_file() for name in names)
        manager = TaskManager(include_path=include_path, include_defaults=not only_files)
        for name in self.names:
            if not Path(name).is_file() and name not in manager.task_index:
                raise UsageError(f"tasks: lm_eval knows no {name!r}{did_you_mean(name, manager.all_tasks)}")
        try:
            self.loaded = manager.load(self.names)
        except Exception as error:  # the Hub, the network, the formats and the definitions each raise their own
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UsageError(f"tasks={','.join(self.names)}: cannot be loaded ({reason})") from error
        for task in self.loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            task.set_config(key="num_fewshot", value=own or 0 if own == 0 or num_fewshot is None else num_fewshot)


@torch.no_grad()
def evaluate(
    model: TextModel,
    tasks: Tasks,
    batch_size: int = 8,
    max_length: int | None = None,
    limit: float | None = None,
    stderr: bool = False,
) -> dict[str, Any]:
    """What `lm_eval.evaluate` returns, on every rank; all ranks must call. Draws no global random numbers.

    Args:
        model: in the mode (train or eval) in which to run it.
        tasks: to run.
        batch_size: rows in a forward pass of one process.
        max_length: tokens in the longest row; None: as the model says.
        limit: questions of each task, or below 1 a share of them; None: all.
        stderr: also standard errors, those without a formula by lm_eval's 100,000 resamplings, which take seconds.

    Source: `simple_evaluate` and `evaluate` in
        https://github.com/EleutherAI/lm-evaluation-harness/blob/main/lm_eval/evaluator.py. The first one also seeds the
        global random numbers and asks git and other programs for versions, which has no place in training.
    """
    adapter = HarnessModel(model, batch_size, max_length)
    defaults = inspect.signature(simple_evaluate).parameters
    for task in tasks.loaded["tasks"].values():  # the same examples at each evaluation
        task.set_fewshot_seed(seed=defaults["fewshot_random_seed"].default)
    iterations = defaults["bootstrap_iters"].default if stderr else 0
    with replaced(lm_eval_task, "tqdm", partial(tqdm, disable=True)):
        found = lm_eval_evaluate(adapter, tasks.loaded, limit=limit, bootstrap_iters=iterations, log_samples=False)
    return gather(found)[0]


def figures(results: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of `evaluate` as `TASK/METRIC`, or `TASK/METRIC/FILTER` where the task filters the answers.

    Example:
        >>> figures({"results": {"arc_easy": {"alias": "arc_easy", "acc,none": 0.5, "acc_stderr,none": 0.1}}})
        {'arc_easy/acc': 0.5}
    """
    found = {}
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, comma, filter_ = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                found["/".join([task, metric, *([] if filter_ == "none" else [filter_])])] = float(value)
    return found
