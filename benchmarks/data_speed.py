"""What text to tokens costs by tiktoken and by tokenizers, and what a batch costs beside nanoGPT's loop.

    python -m benchmarks.data_speed --out data_speed.json

Both encoders take the standard library's sources with a tokenizer that is learned from them; the ids are compared.
`tiktoken` has the first megabyte by tokenizers, the checks and all threads, as a preparation of data has them;
`tiktoken_alone` is what a longer text costs, on one thread. The loaders read one shard of random ids on one thread:
ours, `TokenData`'s, with the check of each id; `MixtureData`'s, of the same tokens as 35 sources of other weights; and
the loop of nanoGPT's train.py, which maps the file anew for each batch and draws its rows at random. Contenders take
turns; a figure is the median over the rounds of CPU time, of wall time where it says so; ratios are taken in a round.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.feed import write_tokens
from lightning_tricks.accounting.device_speed import available_cores
from lightning_tricks.data import MixtureData, MixtureSource, ShardWriter, TokenData, open_shard, text_encoder
from lightning_tricks.data.corpus import standard_library
from lightning_tricks.data.tokenizer import train_bpe

VOCABULARIES = (4096, 32768)
SIZES = ((1, 16), (8, 256), (16, 1024))  # rows and tokens of a batch
SOURCES = 35
SHARD_TOKENS, BATCH_TOKENS = 20_000_000, 4_000_000  # the latter served in a round, by at most 1000 batches


def in_turns(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall seconds of each call, by contender; the first round does not count."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in contenders if number % 2 else reversed(contenders):
            cpu, wall = time.process_time(), time.perf_counter()
            contenders[name]()
            if number:
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return times


def ratio(times: dict[str, list[tuple[float, float]]], name: str, over: str, which: int = 0) -> dict[str, float]:
    """Median and extremes over the rounds of one contender's time over another's."""
    values = [mine[which] / other[which] for mine, other in zip(times[name], times[over], strict=True)]
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def encoders(vocab_size: int, rounds: int) -> dict[str, Any]:
    """Megabytes a second of both encoders."""
    documents = list(standard_library().documents())
    megabytes = sum(len(document.encode()) for document in documents) / 1e6
    tokenizer, build = train_bpe(documents, vocab_size), text_encoder.fast_bpe

    def encode(fast: bool) -> list[NDArray[np.int64]]:
        text_encoder.fast_bpe = build if fast else lambda tokenizer: None
        try:
            return [ids for _, ids in text_encoder.encode_all(tokenizer, documents)]
        finally:
            text_encoder.fast_bpe = build

    equal = all(map(np.array_equal, encode(True), encode(False)))
    started = time.process_time()
    fast = build(tokenizer)
    seconds_to_build = time.process_time() - started
    assert fast is not None
    contenders: dict[str, Callable[[], Any]] = {
        "tiktoken": lambda: encode(True),
        "tokenizers": lambda: encode(False),
        "tiktoken_alone": lambda: list(map(fast.encode, documents)),
    }
    times = in_turns(contenders, rounds)
    speeds = {
        name: {
            kind: round(megabytes / statistics.median(seconds[which] for seconds in seen), 2)
            for which, kind in enumerate(("megabytes_per_cpu_second", "megabytes_per_second"))
        }
        for name, seen in times.items()
    }
    return {
        "vocab_size": vocab_size, "documents": len(documents), "megabytes": round(megabytes, 2), "equal_ids": equal,
        "build_cpu_seconds": round(seconds_to_build, 2), **speeds,
        "cpu_tiktoken_over_tokenizers": ratio(times, "tiktoken", "tokenizers"),
        "wall_tiktoken_over_tokenizers": ratio(times, "tiktoken", "tokenizers", 1),
    }  # fmt: skip


def nanogpt(path: Path, rows: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches as `get_batch` of https://github.com/karpathy/nanoGPT/blob/master/train.py makes them on a CPU."""
    while True:
        mapped = np.memmap(path, dtype=np.uint16, mode="r")
        starts = torch.randint(len(mapped) - tokens, (rows,)).tolist()
        inputs = [torch.from_numpy(mapped[start : start + tokens].astype(np.int64)) for start in starts]
        labels = [torch.from_numpy(mapped[start + 1 : start + 1 + tokens].astype(np.int64)) for start in starts]
        yield torch.stack(inputs), torch.stack(labels)


def loaders(folder: Path, rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """CPU time of a batch."""
    data = TokenData(str(folder / "train_*.bin"), vocab_size=50257, seq_len=tokens, micro_batch_size=rows)
    data.setup()
    paths = sorted(map(str, folder.glob("source_*.bin")))
    sources: list[MixtureSource | str] = [
        MixtureSource(TokenData(path), weight=1 + n**2) for n, path in enumerate(paths)
    ]
    mixture = MixtureData(sources, seq_len=tokens, micro_batch_size=rows)
    mixture.setup()
    mixture.check_ids(50257)
    feeds: dict[str, Iterator[Any]] = {
        "ours": iter(data.train_dataloader()),
        "mixture": iter(mixture.train_dataloader()),
        "nanogpt": nanogpt(folder / "bare.bin", rows, tokens),
    }
    number = min(BATCH_TOKENS // (rows * tokens), 1000)

    def take(feed: Iterator[Any]) -> None:
        for _ in range(number):
            next(feed)

    times = in_turns({name: lambda feed=feed: take(feed) for name, feed in feeds.items()}, rounds)  # type: ignore[misc]
    batch = {name: statistics.median(cpu for cpu, _ in seen) / number for name, seen in times.items()}
    return {
        "rows": rows, "tokens": tokens,
        "cpu_us_a_batch": {name: round(seconds * 1e6, 1) for name, seconds in batch.items()},
        "cpu_ns_a_token": {name: round(seconds * 1e9 / (rows * tokens), 2) for name, seconds in batch.items()},
        "cpu_ours_over_nanogpt": ratio(times, "ours", "nanogpt"),
        "cpu_mixture_over_ours": ratio(times, "mixture", "ours"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "data_speed", "machine": machine.describe(), "rounds": options.rounds}
    result["encoder_versions"] = {name: version(name) for name in ("tiktoken", "tokenizers")}
    result["cpus"] = available_cores()
    result["loaders"] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder, 50257, SHARD_TOKENS)
        tokens = open_shard(folder / "train_000000.bin")
        tokens.tofile(folder / "bare.bin")
        for number, part in enumerate(np.array_split(tokens, SOURCES)):
            with ShardWriter(folder, f"source_{number:02d}", 50257) as writer:
                writer.append(part)
        for rows, length in SIZES:
            result["loaders"].append(loaders(folder, rows, length, options.rounds))
            print(json.dumps(result["loaders"][-1]), flush=True)
    result["encoders"] = []
    for vocab_size in VOCABULARIES:
        result["encoders"].append(encoders(vocab_size, options.rounds))
        print(json.dumps(result["encoders"][-1]), flush=True)
    out = options.out or Path(__file__).parent / "results" / f"data-speed-{machine.today()}-cpu.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
