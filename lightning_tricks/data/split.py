"""Which documents are held out: those whose hash is small.

A document's side depends on its own text alone, so reordering or adding documents moves none from one side to the
other, and a duplicate never lands on both.
"""

import hashlib
from collections.abc import Iterable

from lightning_tricks._errors import UsageError


def document_hash(document: str) -> int:
    """64 bits of the document's SHA-256."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big")


def validation_threshold(documents: Iterable[str], val_fraction: float) -> int:
    """The bound below which a document's hash puts it into validation.

    Normally `val_fraction * 2**64`. Where so few documents are there that this selects none, the one with the smallest
    hash is held out; reading stops as soon as both sides are known to have a document.

    Args:
        documents: all of them, read lazily.
        val_fraction: share of the documents to hold out, in (0, 1).

    Raises:
        UsageError: the two sides cannot both get a document.
    """
    threshold = round(val_fraction * 2**64)
    low, high = 2**64, -1
    for document in documents:
        number = document_hash(document)
        low, high = min(low, number), max(high, number)
        if low < threshold <= high:
            return threshold
    if low >= high:
        found = "no text" if high < 0 else "one document"
        raise UsageError(f"files: {found} where training and validation need a document each; add text")
    # all are on one side: the document nearest to the other side goes there
    return low + 1 if low >= threshold else high
