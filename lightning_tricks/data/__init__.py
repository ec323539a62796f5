"""Text -> tokens -> batches addressed by position.

One word for each number: the position of a sample counts all samples of the run; its row counts them without those
that are passed over; the offset of a token counts the tokens of a stream; a run's cursor is the row that comes next.
"""

from lightning_tricks.data.mixture_data import MixtureData, MixtureSource, WeightChange
from lightning_tricks.data.order import permute
from lightning_tricks.data.shards import ShardWriter, open_shard
from lightning_tricks.data.text_data import TextData
from lightning_tricks.data.token_data import TokenData
from lightning_tricks.data.tokenizer import SavedTokenizer, tokenizer_from_checkpoint

__all__ = [
    "MixtureData",
    "MixtureSource",
    "SavedTokenizer",
    "ShardWriter",
    "TextData",
    "TokenData",
    "WeightChange",
    "open_shard",
    "permute",
    "tokenizer_from_checkpoint",
]
