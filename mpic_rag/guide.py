"""The bundled collection: an illustrated guide to a coastal railway, and questions about it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mpic_rag.documents import Document, read_folder

FOLDER = Path(__file__).parent / "data" / "guide"


@dataclass(frozen=True)
class Question:
    """A question about a shelf, and the (page, paragraph) pairs that its answer stands in.

    `split` where a needed fact is apart from its station's name.
    """

    shelf: str
    question: str
    answer: str
    kind: str
    split: bool
    evidence: list[tuple[str, int]]


def shelves(folder: Path = FOLDER) -> dict[str, list[Document]]:
    """Read the shelves, each a list of documents."""
    return {path.name: read_folder(path) for path in sorted(folder.glob("shelf-*"))}


def questions(folder: Path = FOLDER) -> list[Question]:
    """Read the questions."""
    fields = Question.__dataclass_fields__
    rows = json.loads((folder / "questions.json").read_text())
    for row in rows:
        row["evidence"] = [tuple(place) for place in row["evidence"]]
    return [Question(**{name: row[name] for name in fields}) for row in rows]
