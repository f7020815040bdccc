"""The simplest retriever: a whole shelf, its documents in random order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mpic_rag.documents import Chunk, Document


def retrieve_shelf(documents: Sequence[Document], seed: int) -> list[Chunk]:
    """Return all chunks, documents shuffled, each document's chunks in reading order."""
    order = random.Random(seed).sample(documents, len(documents))
    return [chunk for document in order for chunk in document.chunks]
