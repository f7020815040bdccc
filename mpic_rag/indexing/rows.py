"""What an index keeps of a file and of a passage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

COLUMNS = "id, document, number, name, text, picture, headings, page, near, context, chunks, search"


class File(NamedTuple):
    """What is known of a file: `stamp` tells whether it changed, `reason` why it was skipped."""

    path: str
    stamp: str
    document: str | None
    reason: str
    depends: list[str]
    notes: dict[str, int]


class Row(NamedTuple):
    """A passage as it is kept; `chunks` are (digest, context) of its text and picture."""

    id: str
    document: str
    number: int
    name: str
    text: str
    picture: str | None
    headings: list[str]
    page: int | None
    near: str
    context: str
    chunks: list[tuple[str, str]]
    search: str


def as_row(values: Sequence[Any]) -> Row:
    """A passage from its `COLUMNS`."""
    *front, headings, page, near, context, chunks, search = values
    pairs = [tuple(pair) for pair in json.loads(chunks)]
    return Row._make([*front, json.loads(headings), page, near, context, pairs, search])
