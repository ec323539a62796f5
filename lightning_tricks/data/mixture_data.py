"""Several sources in one run, each with its share of the rows."""

import inspect
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.address import default_cache_dir
from lightning_tricks._trainer.lightning import pl, rank_zero_info, rank_zero_warn
from lightning_tricks.data.base import Source, TokenDataModule
from lightning_tricks.data.cursor import steps_done
from lightning_tricks.data.mixture import UNIT, Mixture, Resolved, Stage
from lightning_tricks.data.order import Pass, RowOrder, SkippedSamples, derive_key
from lightning_tricks.data.text_data import TextData, learn_tokenizer
from lightning_tricks.data.token_data import TokenData, holds_tokens
from lightning_tricks.data.tokenizer import (
    check_vocab_size,
    end_of_text,
    open_tokenizer,
    tokenizer_sha256,
    vocabulary_size,
)

__all__ = ["MixtureData", "MixtureSource", "WeightChange"]

_OF_THE_MIXTURE = ("seq_len", "micro_batch_size", "num_workers", "seed", "document_ids", "skip_samples")


@dataclass
class MixtureSource:
    """One source of a mixture.

    Args:
        data: TextData or TokenData; or a path or glob: token files are recognised, other files are text.
        weight: its share of the rows, in any unit; either all sources have one, or none.
        name: in metrics, messages and `weights`; None takes the first file's. A checkpoint knows the source by it.
        max_epochs: passes after which it ends, and its share goes to the others; None for no end.
    """

    data: TokenDataModule | str
    weight: float | None = None
    name: str | None = None
    max_epochs: int | None = None


@dataclass
class WeightChange:
    """Weights from a point of the run on.

    Args:
        weights: of all sources, by name.
        at_tokens: tokens of the run before it.
        at_fraction: share of the run before it, of `trainer.max_steps`; give one of the two.
    """

    weights: dict[str, float]
    at_tokens: int | None = None
    at_fraction: float | None = None


class MixtureData(TokenDataModule):
    """Batches whose rows come from several sources, in exact shares and without a period.

    The source of a row, and its row in that source, follow from the row's position in the run alone. So a run resumes
    exactly on any number of processes, workers and micro-batches. Each source has an order and passes (epochs) of its
    own. Up to any position, the rows of a source differ from its share by a number that is known before the run and
    stands in its first lines: one row for two sources, under three for 35.

    Weights, and sources, may change at a resume: they hold from there on, each source goes on with its next row, and
    one line says what changes. A source that the recipe names no more keeps its place, should it come back.

    Batches have `source` (B,) int64, the number of each row's source. Validation batches have rows of one source each.
    A LanguageModel logs losses, tokens and epochs of each.

    Example:
        >>> data = MixtureData([{"data": "web/*.txt", "weight": 0.7}, {"data": "code/*.jsonl", "weight": 0.3}])

    Args:
        sources: what is mixed, or paths alone; all have one tokenizer.
        weights: later weights, such as those of an annealing phase.
        temperature: without weights, each source's is its number of tokens to this power: 1 takes all tokens equally
            often, 0 all sources.
        tokenizer: a `tokenizers` JSON file, or a checkpoint; None takes the sources', or learns a byte-level BPE from
            the text of all of them.
        vocab_size: tokens to learn when no tokenizer is given; after `setup`, the attribute is the tokenizer's size.
        seq_len: tokens in a row.
        micro_batch_size: rows in a batch of one process.
        num_workers: processes that fetch batches.
        seed: of the order of the rows.
        document_ids: add `document_ids` and `document_starts`, so that attention can stay within documents.
        cache_dir: folder for a tokenizer, and for the shards of sources that are paths; None means
            $XDG_CACHE_HOME/lightning_tricks or ~/.cache/lightning_tricks.
        skip_samples: training rows to pass over, as [first, last] sample positions, such as StepGuard names them.

    Raises:
        UsageError: bad options, other tokenizers, weights without a sum, sources that end before the run does.
    """

    def __init__(
        self,
        sources: list[MixtureSource | str],
        weights: list[WeightChange] | None = None,
        temperature: float | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 4096,
        seq_len: int = 256,
        micro_batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 0,
        document_ids: bool = False,
        cache_dir: str | None = None,
        skip_samples: list[list[int]] | None = None,
    ) -> None:
        super().__init__(seq_len, micro_batch_size, num_workers, seed, document_ids, skip_samples)
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        if tokenizer is None:
            check_vocab_size(vocab_size)
        self._given_tokenizer, self._tokenizer_name = open_tokenizer(tokenizer)
        self._vocab_size_to_learn = vocab_size
        self.vocab_size = vocab_size if self._given_tokenizer is None else vocabulary_size(self._given_tokenizer)
        given = [_source_of(source) for source in sources]
        if not given:
            raise UsageError("sources=[]: name at least one")
        self._parts: dict[str, TextData | TokenData] = {
            name: self._module_of(source) for name, source in zip(_names(given), given, strict=True)
        }
        self._max_epochs = {name: source.max_epochs for name, source in zip(self._parts, given, strict=True)}
        for name, epochs in self._max_epochs.items():
            if epochs is not None and epochs < 1:
                raise UsageError(f"sources: max_epochs={epochs} of {name}: it must be at least 1, or left out")
        self._weights, self.temperature = self._checked_weights(given, temperature), temperature
        changes = [WeightChange(**change) if isinstance(change, dict) else change for change in weights or ()]
        self._changes = [self._checked_change(change) for change in changes]
        if self._given_tokenizer is None and not any(isinstance(part, TextData) for part in self._parts.values()):
            self.vocab_size = max((part.vocab_size or 0 for part in self._parts.values()), default=0) or None
        self._mixture: Mixture | None = None
        self._past: list[Resolved] = []  # segments of the runs that this one goes on from
        self._fingerprints: dict[str, str] = {}  # in their checkpoint, by source

    def _module_of(self, source: MixtureSource) -> TextData | TokenData:
        """The data module of a source, whose settings for rows are the mixture's."""
        if isinstance(source.data, TextData | TokenData):
            defaults = inspect.signature(type(source.data).__init__).parameters
            learns = isinstance(source.data, TextData) and source.data._given_tokenizer is None
            for option in (*_OF_THE_MIXTURE, *["vocab_size"] * learns):
                if (value := getattr(source.data, option)) not in (defaults[option].default, getattr(self, option)):
                    raise UsageError(f"sources: data.{option}={value!r}: a mixture has one {option}, set it there")
            return source.data
        if isinstance(source.data, TokenDataModule) or not isinstance(source.data, str | Path):
            raise UsageError(f"sources: data={type(source.data).__name__}: give TextData, TokenData or a path")
        path = str(source.data)
        make = TokenData if holds_tokens(path) else TextData
        return make(path, cache_dir=str(self.cache_dir))

    def _checked_weights(self, given: Sequence[MixtureSource], temperature: float | None) -> dict[str, float] | None:
        """The first weights by name; None where they follow from the sizes."""
        weights = [source.weight for source in given if source.weight is not None]
        if not weights:
            if temperature is not None and not 0 <= temperature < math.inf:
                raise UsageError(f"temperature={temperature}: it must be 0 or more; 1 takes all tokens equally often")
            return None
        if temperature is not None:
            raise UsageError(f"temperature={temperature}: it makes weights of the sizes; leave out the sources' own")
        missing = [name for name, source in zip(self._parts, given, strict=True) if source.weight is None]
        if missing:
            raise UsageError(f"sources: {', '.join(missing)} have no weight, and others have; give all one, or none")
        return _positive("sources", dict(zip(self._parts, weights, strict=True)))

    def _checked_change(self, change: WeightChange) -> WeightChange:
        if other := change.weights.keys() ^ self._parts.keys():
            wrong = "is no source" if change.weights.keys() - self._parts.keys() else "has no weight"
            raise UsageError(f"weights: {sorted(other)[0]} {wrong}; name each of {', '.join(self._parts)}")
        _positive("weights", change.weights)
        if (change.at_tokens is None) == (change.at_fraction is None):
            raise UsageError("weights: give at_tokens or at_fraction")
        if change.at_tokens is not None and change.at_tokens < 0:
            raise UsageError(f"weights: at_tokens={change.at_tokens}: it must be 0 or more")
        if change.at_fraction is not None and not 0 <= change.at_fraction <= 1:
            raise UsageError(f"weights: at_fraction={change.at_fraction}: it must lie between 0 and 1")
        return change

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse sources that are not there."""
        for part in self._parts.values():
            part.check_run(trainer, datamodule, stage)

    def check_sample(self, vocab_size: int | None) -> str:
        """Look at each source as its own check does; a line on them, for `check`."""
        if not self._share_tokenizer(learn=False):
            texts = ", ".join(part.corpus.description for part in self._parts.values() if isinstance(part, TextData))
            return f"fit learns a tokenizer of {self._vocab_size_to_learn:,} tokens first, or prepare, from {texts}"
        return "; ".join(f"{name}: {part.check_sample(vocab_size)}" for name, part in self._parts.items())

    def is_prepared(self) -> bool:
        """Whether all texts are tokenized."""
        return self._share_tokenizer(learn=False) and all(part.is_prepared() for part in self._parts.values())

    def prepare_share(self, rank: int, world: int) -> int:
        """See `TextData.prepare_share`, for all sources of text."""
        self._share_tokenizer()
        return sum(part.prepare_share(rank, world) for part in self._parts.values() if isinstance(part, TextData))

    def prepare_data(self) -> None:
        """Tokenize sources of text into the cache, unless that has been done."""
        self._share_tokenizer()
        for part in self._parts.values():
            if isinstance(part, TextData):
                part.prepare_shards()
        if any(part.row_plan for part in self._parts.values()):
            self._plan_rows(self._opened())

    def setup(self, stage: str | None = None) -> None:
        """Open the sources and check that one tokenizer wrote all of them."""
        self._share_tokenizer()
        opened = self._opened()
        self.use(opened, self._given_tokenizer, self._tokenizer_name)
        if self._given_tokenizer is None and self.vocab_size is not None:
            self.check_ids(self.vocab_size, "vocab_size")
        self._mixture = Mixture(self._stages(None), self._limits(), self.seed)

    def _opened(self) -> list[Source]:
        """The sources, each with its own order."""
        opened = {name: part.open_source() for name, part in self._parts.items()}
        for name, source in opened.items():
            self._parts[name].sources = [source]  # by which it finds the file of a token
            if "train" not in source.streams:
                raise UsageError(f"sources: {name} has no training tokens; leave it out")
            source.name, source.seed = name, derive_key(self.seed, *name.encode())
        return [*opened.values()]

    def _share_tokenizer(self, learn: bool = True) -> bool:
        """Give each source the tokenizer of the mixture, of the other sources, or one learned from all texts.

        Returns:
            Whether it is known; without `learn`, it may have to be learned.

        Raises:
            UsageError: sources have different ones.
        """
        known: dict[str, tuple[str, Tokenizer, str]] = {}
        for name, part in {"the mixture": self, **self._parts}.items():
            part.trainer = self.trainer
            if part._given_tokenizer is not None:
                known.setdefault(
                    tokenizer_sha256(part._given_tokenizer), (name, part._given_tokenizer, part._tokenizer_name)
                )
        if len(known) > 1:
            (first, *_), (second, *_) = list(known.values())[:2]
            raise UsageError(f"sources: {first} and {second} have different tokenizers; encode both with one")
        texts = [part for part in self._parts.values() if isinstance(part, TextData)]
        if not known and texts:
            if written := [name for name, part in self._parts.items() if isinstance(part, TokenData)]:
                raise UsageError(
                    f"tokenizer=None: give the one that wrote {written[0]}, so that text gets the same ids"
                )
            path = learn_tokenizer(texts, self._vocab_size_to_learn, self.cache_dir, learn)
            if path is None:
                return False
            tokenizer, _ = open_tokenizer(str(path))
            assert tokenizer is not None
            known[""] = ("", tokenizer, f"BPE of {vocabulary_size(tokenizer)} tokens learned from {len(texts)} sources")
        for _, tokenizer, tokenizer_name in known.values():
            for part in (self, *self._parts.values()):
                part._given_tokenizer, part._tokenizer_name = tokenizer, tokenizer_name
                part.vocab_size = vocabulary_size(tokenizer)
                part.eot_id = end_of_text(tokenizer) if part.eot_id is None else part.eot_id
        ends = {part.eot_id for part in self._parts.values() if part.eot_id is not None}
        if len(ends) > 1:
            raise UsageError(f"sources: their eot_id are {sorted(ends)}: documents of all end with the same token")
        self.eot_id = next(iter(ends), None)
        return True

    # ---- which row comes from where

    def _identity(self) -> dict[str, Any]:
        return {}  # a source may change at a resume; see `state_dict`

    def _limits(self) -> dict[str, int]:
        """Rows after which a source ends, by name."""
        passes = {source.name: self._pass(source).rows for source in self.sources}
        return {name: epochs * passes[name] for name, epochs in self._max_epochs.items() if epochs is not None}

    def _stages(self, trainer: pl.Trainer | None) -> list[Stage]:
        """The recipe's weights by the position from which they hold; without a run, fractions of it are left out."""
        weights = self._weights
        if weights is None:
            power = 1.0 if self.temperature is None else self.temperature
            tokens = {source.name: len(source.streams["train"]) for source in self.sources}
            weights = {name: (count / max(tokens.values())) ** power for name, count in tokens.items()}
        stages = [Stage(0, weights)]
        for change in self._changes:
            if change.at_tokens is not None:
                stages.append(Stage(-(-change.at_tokens // self.seq_len), change.weights))
            elif trainer is not None:
                assert change.at_fraction is not None
                if trainer.max_steps < 0:  # by now TotalTokens has set it
                    raise UsageError("weights: at_fraction needs trainer.max_steps or TotalTokens; else give at_tokens")
                step = round(change.at_fraction * trainer.max_steps)
                stages.append(Stage(self._cursor.position_at(trainer, step), change.weights))
        return stages

    def _begin(self, trainer: pl.Trainer) -> None:
        """As the base class; then decide the source of each row of this run."""
        super()._begin(trainer)
        start = self._cursor.position_at(trainer)
        self._mixture = Mixture(self._stages(trainer), self._limits(), self.seed, self._past, start)
        if self._past:
            self._say_changes(start)
        self._past = self._mixture.segments()
        self._say_ends(trainer, start)

    def _say_changes(self, start: int) -> None:
        """What is other than in the checkpoint's run."""
        assert self._mixture is not None
        before, now = self._past, self._mixture.segments()
        weights = [
            _percent(max((s for s in segments if s.position <= start), key=lambda s: s.position).weights)
            for segments in (before, now)
        ]
        if weights[0] != weights[1]:
            rank_zero_info(f"From sample {start:,} on, the mixture is {weights[1]}; it was {weights[0]}")
        other = [
            source.name
            for source in self.sources
            if self._fingerprints.get(source.name, _identity_of(source)) != _identity_of(source)
        ]
        if other:
            rank_zero_warn(
                f"Not the data of the checkpoint's run: {', '.join(other)}. Rows of these sources may come again or be "
                "left out in this pass."
            )

    def _say_ends(self, trainer: pl.Trainer, start: int) -> None:
        """When sources end; refuses a run that is longer than all of them."""
        assert self._mixture is not None
        stop = self._cursor.position_at(trainer, trainer.max_steps) if trainer.max_steps >= 0 else None
        if stop is None and (passes := trainer.max_epochs or 0) > 0:
            stop = passes * self._order().rows_in_pass
        end = self._mixture.end
        if end is not None and (stop is None or stop > end):
            length = "has no end" if stop is None else f"takes {stop:,} rows"
            raise UsageError(
                f"sources: by max_epochs all of them end after {end:,} rows, and the run {length}; raise max_epochs of "
                "one, or lower trainer.max_steps or its max_epochs"
            )
        segments = self._mixture.segments()
        for before, after in pairwise(segments):
            gone = [name for name in before.weights if name not in after.weights and self._max_epochs.get(name)]
            if gone and start <= after.position < (stop or math.inf):
                then = _percent(after.weights)
                rank_zero_info(f"{', '.join(gone)} ends at sample {after.position:,}, after max_epochs; then {then}")

    def _order(self, skipped: SkippedSamples | None = None) -> RowOrder:
        assert self._mixture is not None  # made in `setup`
        passes = {source.name: self._pass(source) for source in self.sources}
        of_no_source = Pass(1, 0, 1, 0)  # of earlier runs; none of its rows comes from now on
        return RowOrder([passes.get(name, of_no_source) for name in self._mixture.names], self._mixture, skipped)

    def seen_sources(self, trainer: pl.Trainer) -> dict[str, tuple[int, float]]:
        """Tokens and epochs that each source has served when the running step is done, by name."""
        return self.seen(self._cursor.position_at(trainer, steps_done(trainer) + 1))

    def seen(self, position: int) -> dict[str, tuple[int, float]]:
        """Tokens and epochs of each source in the samples before a position, but for skipped ones, by name."""
        assert self._mixture is not None
        passes = {source.name: self._pass(source).rows for source in self.sources}
        counts = Counter(self._mixture.counts(position))
        for first, last in self._cursor.skipped.ranges:
            if first < position:
                counts.subtract(self._mixture.counts(min(last + 1, position)))
                counts.update(self._mixture.counts(first))
        return {name: (counts[name] * self.seq_len, counts[name] / passes[name]) for name in passes}

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As the base class; also which rows came from which source."""
        state = super().state_dict()
        if state and self._mixture is not None:
            fingerprints = {source.name: _identity_of(source) for source in self.sources}
            state["mixture"] = {"segments": self._mixture.state(), "sources": fingerprints}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In a fit, go on with the next row of each source.

        Raises:
            UsageError: see `check_tokenizer`.
        """
        super().load_state_dict(state_dict)
        if self.trainer is None or self.trainer.state.fn == "fit":
            self._past = Mixture.of_state(state_dict["mixture"]["segments"])
            self._fingerprints = state_dict["mixture"]["sources"]

    def samples_of_step(self, step: int, state: dict[str, Any]) -> list[tuple[int, int]]:
        """As the base class; from now on, rows are those of the checkpoint's run.

        Raises:
            UsageError: also for a source of that run that this recipe does not have.
        """
        past = Mixture.of_state(state["mixture"]["segments"])
        known = {name for segment in past for name in segment.weights}
        if missing := known - self._parts.keys():
            raise UsageError(f"sources: the checkpoint's run also had {', '.join(sorted(missing))}; give its recipe")
        first = Stage(0, dict.fromkeys(self._parts, 1.0))  # fixes the numbers of the sources, and nothing else
        self._mixture = Mixture([first], {}, self.seed, past, since=past[-1].position + 1)
        return super().samples_of_step(step, state)

    def source_files(self, offsets: Sequence[int], source: int = 0) -> list[Path | None]:
        """See `TokenDataModule.source_files`."""
        return [*self._parts.values()][source].source_files(offsets)

    def data_summary(self) -> str:
        """One line on the shares and sizes; after `setup`."""
        assert self._mixture is not None
        shares = self._mixture.segments()[0].weights
        parts = [
            f"{source.name} {shares.get(source.name, 0) / UNIT:.2%} ({len(source.streams['train']):,} tokens"
            f"{source.plan_summary})"
            for source in self.sources
        ]
        return f"Mixture: {', '.join(parts)}; each within {self._mixture.bound:.2f} rows of its share at any step"


def _names(given: Sequence[MixtureSource]) -> list[str]:
    """The names of the sources, each its own."""
    names = []
    for number, source in enumerate(given):
        name = source.name or _name_of(source.data)
        if not re.fullmatch(r"[\w.+-]+", name):
            raise UsageError(f"sources[{number}].name={name!r}: give it a name of letters, digits and _ . + -")
        if name in names:
            raise UsageError(f"sources: two are called {name}; give each a name of its own")
        names.append(name)
    return names


def _name_of(data: TokenDataModule | str) -> str:
    """The name of the first file or dataset, or of the folder in which a glob looks."""
    first: Any = data
    if isinstance(data, TextData):
        first = data.hf_dataset or (data.files or ["stdlib"])[0]
    elif isinstance(data, TokenData):
        first = data.train if isinstance(data.train, str) else data.train[0]
    path = Path(str(first))
    return path.parent.name if "*" in path.name and path.parent.name else path.name.partition(".")[0].strip("_*")


def _positive(option: str, weights: Mapping[str, float]) -> dict[str, float]:
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise UsageError(f"{option}: weight={weight} of {name}: it must be 0 or more")
    if not sum(weights.values()):
        raise UsageError(f"{option}: all weights are 0; give one source more")
    return dict(weights)


def _percent(weights: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {weight / UNIT:.2%}" for name, weight in weights.items())


def _identity_of(source: Source) -> str:
    return f"{source.fingerprint}{source.content or ''}"


def _source_of(given: MixtureSource | str | dict[str, Any]) -> MixtureSource:
    if isinstance(given, dict):
        return MixtureSource(**given)
    return given if isinstance(given, MixtureSource) else MixtureSource(given)
