"""Text -> token ids by the fastest encoder with the tokenizer's own ids: tiktoken where it has them, else tokenizers.

The two cut a text into pieces by the same regular expression, and merge the bytes of a piece. What has to hold so that
the ids are equal is checked on the tokenizer itself, on the characters of each document, and on the first documents;
where it does not hold, or tiktoken is not installed, `tokenizers` encodes. So the ids never depend on the encoder.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from lightning_tricks.accounting.device_speed import available_cores
from lightning_tricks.data.tokenizer import PATTERNS, byte_alphabet, not_plain, split_pattern

if TYPE_CHECKING:
    import tiktoken

_OLDEST = (0, 13)  # of tiktoken: before it, a long run without a space took quadratic time
_LONGEST_SPACE = 100_000  # its regular expressions run out of stack in a run of 500,000 whitespace characters
_TEN_SPACES = re.compile(r"\s{10}")
_COMPARED = 1 << 20  # characters of the first documents, for which both must give the same ids
_TASK, _TOKENIZERS_TASK = 1 << 16, 1 << 20  # characters encoded at once
_UNKNOWN, _EQUAL, _DIFFERENT = range(3)
_ODD = (
    "a  b   c\t\td \t e\n f\n\n\n  g \r\n\r\nh  ",
    "it's we'll I'm you've they'd don't we're IT'S WE'LL I'M o'clock '' ''s 's's 'S 'lL",
    "1 12 123 1234 12345 3.14 1,000,000 0x1F a1b2 1a 007\t8\n9",
    "!? ... -- ==> !\n!!\n\n ?\r\n(a)[b]{c} <|endoftext|> </s> ~`@#$%^&*_+|\\",
    "".join(map(chr, range(128))),
    "\x1c \x1d\x1e\x1f \x0b\x0c \x00\x00a",
)


def encode_all(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Each document with its token ids, by all cores; see `TextEncoder.encode_all`."""
    return TextEncoder(tokenizer).encode_all(documents, available_cores())


class TextEncoder:
    """Encodes documents; tiktoken is compared with the tokenizer once, on the first documents.

    Args:
        tokenizer: see `as_text_only`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self._fast, self._compared = tokenizer, cast("FastBPE | None", None), False

    def encode_all(self, documents: Iterable[str], threads: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Each document with its token ids, (n,) int64, without special tokens, whose names are text.

        The first megabyte is encoded by `tokenizers`, which suffices for a short text; where tiktoken gives all of its
        documents the same ids, it encodes what follows.

        Args:
            documents: read as far ahead as they are encoded, a few megabytes.
            threads: with several, they encode the next documents while the caller takes these.
        """
        documents = iter(documents)
        if not self._compared:
            first = next(_tasks(documents, _COMPARED), [])
            expected = _by_tokenizers(self.tokenizer, first)
            yield from zip(first, expected, strict=True)
            if not (second := next(_tasks(documents, 0), [])):
                return
            self._fast, self._compared = fast_bpe(self.tokenizer), True
            if self._fast and not all(map(_equal_or_not_taken, map(self._fast.encode, first), expected)):
                self._fast = None
            documents = chain(second, documents)
        tasks = _tasks(documents, _TOKENIZERS_TASK if self._fast is None else _TASK)
        if threads == 1:
            for task in tasks:
                yield from zip(task, _encode(self.tokenizer, self._fast, task), strict=True)
            return
        threads = 1 if self._fast is None else threads  # tokenizers has threads of its own
        pending: deque[tuple[list[str], Future[list[NDArray[np.int64]]]]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            for task in tasks:
                pending.append((task, pool.submit(_encode, self.tokenizer, self._fast, task)))
                if len(pending) > 2 * threads:
                    done, ids = pending.popleft()
                    yield from zip(done, ids.result(), strict=True)
            for done, ids in pending:
                yield from zip(done, ids.result(), strict=True)

    def compare(self, documents: Iterable[str]) -> None:
        """Compare with tiktoken now, so that copies of this process need not."""
        for _ in self.encode_all(documents, threads=1):
            if self._compared:
                return


def _tasks(documents: Iterator[str], size: int) -> Iterator[list[str]]:
    """The documents in lists of at least `size` characters."""
    for document in documents:
        task, length = [document], len(document)
        while length < size and (more := next(documents, None)) is not None:
            task.append(more)
            length += len(more)
        yield task


def _equal_or_not_taken(ids: NDArray[np.int64] | None, expected: NDArray[np.int64]) -> bool:
    return ids is None or np.array_equal(ids, expected)


def _encode(tokenizer: Tokenizer, fast: "FastBPE | None", documents: list[str]) -> list[NDArray[np.int64]]:
    if fast is None:
        return _by_tokenizers(tokenizer, documents)
    ids = [fast.encode(document) for document in documents]
    left = [document for document, known in zip(documents, ids, strict=True) if known is None]
    by_tokenizers = iter(_by_tokenizers(tokenizer, left) if left else ())
    return [next(by_tokenizers) if known is None else known for known in ids]


def _by_tokenizers(tokenizer: Tokenizer, documents: Sequence[str]) -> list[NDArray[np.int64]]:
    encodings = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]


class FastBPE:
    """tiktoken's encoder with a tokenizer's ids, for the documents that it takes; see `fast_bpe`.

    Two libraries of regular expressions may know other versions of Unicode. So each character is probed when it comes
    for the first time: beside letters, digits, signs and spaces, with a vocabulary in which pairs of bytes merge, so
    that another cut gives other ids. A document with a character that they class differently is not taken, nor one
    with the name of an added token that is not special, which `tokenizers` cuts out first, or with very long space.
    """

    def __init__(
        self, encoding: "tiktoken.Encoding", ids: NDArray[np.int64], tokenizer: Tokenizer, pattern: str
    ) -> None:
        self._encoding, self._ids, self._normalizer = encoding, ids, tokenizer.normalizer
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._probe = _probe(tokenizer, pattern)
        self._state = np.zeros(0x110000, dtype=np.uint8)
        self._state[:128] = _EQUAL if self._same_cuts(_ODD).all() else _DIFFERENT

    def encode(self, document: str) -> NDArray[np.int64] | None:
        """Token ids, (n,) int64; None for a document to be encoded by `tokenizers`."""
        if self._added is not None and self._added.search(document):
            return None
        if not document.isascii():
            document = self._normalized(document)
            if self._added is not None and self._added.search(document):
                return None
            if self._has_different(document):
                return None
        elif self._state[0] == _DIFFERENT:
            return None
        # as long a run meets ten of these characters, and a search of all is slow
        if _TEN_SPACES.search(document[:: _LONGEST_SPACE // 10]) and _longest_space(document) >= _LONGEST_SPACE:
            return None
        return self._ids.take(self._encoding.encode_to_numpy(document, disallowed_special=()))

    def _normalized(self, document: str) -> str:
        return document if self._normalizer is None else self._normalizer.normalize_str(document)

    def _has_different(self, document: str) -> bool:
        """Whether a character of the document is classed differently; probes those that are new."""
        points = np.frombuffer(document.encode("utf-32-le"), dtype="<u4")
        state = self._state[points]
        if not state.all():
            new = np.unique(points[state == _UNKNOWN])
            same = self._same_cuts([_beside_others(chr(point)) for point in new.tolist()])
            self._state[new] = np.where(same, _EQUAL, _DIFFERENT)
            state = self._state[points]
        return bool((state == _DIFFERENT).any())

    def _same_cuts(self, texts: Sequence[str]) -> NDArray[np.bool_]:
        """Whether both cut each text at the same places."""
        tokenizer, encoding = self._probe
        expected = [ids.tolist() for ids in _by_tokenizers(tokenizer, texts)]
        found = [encoding.encode_ordinary(self._normalized(text)) for text in texts]
        return np.array([ids == ranks for ids, ranks in zip(expected, found, strict=True)])


def _beside_others(char: str) -> str:
    """The character beside each kind of character that a pattern knows, and twice."""
    beside = "".join(f"{other}{char}{other}" for other in ("a", "1", "!", " ", "\n", "'"))
    return f"{beside}{char}s {char}{char}\n{char}{char}'{char}{char}'l{char}"


def _longest_space(text: str) -> int:
    return max((match.end() - match.start() for match in re.finditer(r"\s+", text)), default=0)


def _probe(tokenizer: Tokenizer, pattern: str) -> "tuple[Tokenizer, tiktoken.Encoding]":
    """Both encoders with the tokenizer's way to cut a text, and a vocabulary in which pairs of bytes merge.

    A token's id is its rank.
    """
    import tiktoken

    chars = {byte: char for char, byte in byte_alphabet().items()}
    ascii_, leads, continuations = sorted(set("".join(_ODD[:4]).encode())), range(0xC2, 0xF5), range(0x80, 0xC0)
    pairs = [
        (first, second)
        for firsts, seconds in ((ascii_, ascii_), (ascii_, leads), (continuations, ascii_), (continuations, leads))
        for first in firsts
        for second in seconds
    ]
    ranks = {bytes([byte]): byte for byte in range(256)} | {bytes(p): 256 + n for n, p in enumerate(pairs)}
    vocab = {"".join(map(chars.__getitem__, token)): rank for token, rank in ranks.items()}
    probe = Tokenizer.from_str(tokenizer.to_str())
    probe.encode_special_tokens = True
    probe.model = models.BPE(vocab, [(chars[first], chars[second]) for first, second in pairs])
    return probe, tiktoken.Encoding("probe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def fast_bpe(tokenizer: Tokenizer) -> FastBPE | None:
    """A tokenizer's encoder by tiktoken; None where its ids could be others, or tiktoken is missing or too old."""
    try:
        import tiktoken
    except ImportError:
        return None
    if tuple(int(number) for number in tiktoken.__version__.split(".")[:2]) < _OLDEST:
        return None
    spec = json.loads(tokenizer.to_str())
    pattern = split_pattern(spec["pre_tokenizer"] or {})
    if not_plain(spec["model"]) or pattern not in PATTERNS or (spec["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return None
    if tokenizer.truncation or tokenizer.padding or not tokenizer.encode_special_tokens:
        return None
    if (ranks := merge_ranks(tokenizer)) is None:
        return None
    vocab, alphabet = spec["model"]["vocab"], {byte: char for char, byte in byte_alphabet().items()}
    ids = np.zeros(max(ranks.values()) + 1, dtype=np.int64)
    for token, rank in ranks.items():
        ids[rank] = vocab["".join(alphabet[byte] for byte in token)]
    # without any special token, encode_to_numpy looks for the empty string at each character
    special = {"<|not cut out|>": len(ids)}
    encoding = tiktoken.Encoding("tokenizer", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return FastBPE(encoding, ids, tokenizer, pattern)


def merge_ranks(tokenizer: Tokenizer) -> dict[bytes, int] | None:
    """The rank of each token with which tiktoken merges as a byte-level BPE does; None where it would merge otherwise.

    tiktoken takes a piece whole if it is a token; else it joins, as long as there are any, the first two neighbours
    whose bytes together are the token of the lowest rank. `tokenizers` joins only the pairs that its rules name, the
    first rule first. Both do the same if

    1. all rules that give a token stand next to each other, so that rules have the order of ranks, and
    2. by the rules, each token's own bytes become that token, or end as pieces of which no two neighbours are a token.

    For suppose that both have done the same so far, and that tiktoken now joins two pieces to a token. Nothing was
    joined across the borders of its bytes, so within them happened what happens to these bytes alone, which by 2 ends
    in a rule for just this pair. By 1 it is the first rule that applies. A token that its own bytes do not become is
    never made in a longer piece either, by the same argument: it is left out, unless the tokenizer takes pieces whole.
    """
    spec = json.loads(tokenizer.to_str())
    model, alphabet = spec["model"], byte_alphabet()

    def as_bytes(token: str) -> bytes:
        return bytes(map(alphabet.__getitem__, token))

    ranks = {bytes([byte]): byte for byte in range(256)}
    for merge in model["merges"]:
        token = as_bytes("".join(merge.split(" ") if isinstance(merge, str) else merge))
        if ranks.setdefault(token, len(ranks)) != len(ranks) - 1:
            return None
    takes_whole = bool(model.get("ignore_merges"))
    if takes_whole:
        for token in model["vocab"]:
            if token and alphabet.keys() >= set(token):
                ranks.setdefault(as_bytes(token), len(ranks))
    chars = {byte: char for char, byte in alphabet.items()}
    rules = Tokenizer.from_str(json.dumps(spec)).model
    rules.ignore_merges = False
    for token in list(ranks)[256:]:
        parts = rules.tokenize("".join(map(chars.__getitem__, token)))
        if len(parts) == 1:
            continue
        if not takes_whole:
            del ranks[token]
        elif any(as_bytes(left.value + right.value) in ranks for left, right in pairwise(parts)):
            return None
    return ranks
