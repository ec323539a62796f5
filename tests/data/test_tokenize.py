"""Held-out documents: by their own text, never by their place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._errors import UsageError
from lightning_tricks.data.tokenize import document_hash, validation_threshold


def held_out(documents, val_fraction):
    threshold = validation_threshold(documents, val_fraction)
    return {document for document in documents if document_hash(document) < threshold}


def test_about_the_asked_share_is_held_out():
    documents = [f"document {n}" for n in range(4000)]
    assert len(held_out(documents, 0.1)) == pytest.approx(400, rel=0.15)


@given(st.lists(st.text(), min_size=30, max_size=60, unique=True), st.randoms())
def test_order_does_not_matter(documents, random):
    shuffled = documents.copy()
    random.shuffle(shuffled)
    assert held_out(documents, 0.2) == held_out(shuffled, 0.2)


@given(st.sets(st.text(), min_size=2, max_size=20), st.floats(0.001, 0.999))
def test_both_sides_get_a_document(documents, val_fraction):
    assert 0 < len(held_out(sorted(documents), val_fraction)) < len(documents)


def test_a_growing_corpus_keeps_its_held_out_documents():
    documents = [f"document {n}" for n in range(1000)]
    assert held_out(documents[:500], 0.1) <= held_out(documents, 0.1)


def test_reading_stops_once_both_sides_have_a_document():
    read = []
    validation_threshold((read.append(n) or f"document {n}" for n in range(100_000)), 0.1)
    assert len(read) < 200


@pytest.mark.parametrize(("documents", "found"), [([], "no text"), (["one"], "one document"), (["a", "a"], "one doc")])
def test_fewer_than_two_documents_cannot_be_split(documents, found):
    with pytest.raises(UsageError, match=f"^files: {found}"):
        validation_threshold(documents, 0.1)
