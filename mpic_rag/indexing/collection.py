"""An index on disk: which files it knows, their documents, their passages; SQLite, one file."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpic_rag.documents import Chunk, Document, Part
from mpic_rag.indexing.passages import Passage
from mpic_rag.indexing.picture_folder import PictureFolder
from mpic_rag.indexing.rows import COLUMNS, File, Row, as_row

FILE = "collection.db"
FORMAT = 1
_SCHEMA = """
create table if not exists facts (name text primary key, value text);
create table if not exists files (
    path text primary key, stamp text, document text, reason text, depends text, notes text
);
create table if not exists documents (id text primary key, title text);
create table if not exists passages (
    id text primary key, document text, number integer, name text, text text, picture text,
    headings text, page integer, near text, context text, chunks text, search text
);
create index if not exists passages_by_document on passages (document, number);
create index if not exists files_by_document on files (document);
create table if not exists forgotten (digest text, context text, primary key (digest, context));
"""


class Collection:
    """A folder with an index. Every change is one transaction; readers see it whole or not."""

    def __init__(self, folder: str | Path, create: bool = False) -> None:
        self.folder = Path(folder)
        if create:
            self.folder.mkdir(parents=True, exist_ok=True)
        elif not (self.folder / FILE).is_file():
            raise ValueError(
                f"{folder} holds no index: `mpic-rag index PATH --out {folder}` makes one"
            )
        self.pictures = PictureFolder(self.folder / "pictures")
        self._lock = threading.RLock()
        self._db = sqlite3.connect(
            self.folder / FILE, timeout=60, isolation_level=None, check_same_thread=False
        )
        try:
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")  # a lost last file is read again
            self._db.executescript(_SCHEMA)
            if self.fact("format") is None:
                self.set_fact("format", FORMAT)
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{folder} holds a damaged index: {error}; index anew") from error
        if self.fact("format") != FORMAT:
            raise ValueError(f"{folder} was indexed by another version: index anew")

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """One transaction."""
        with self._lock:
            self._db.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")

    def fact(self, name: str) -> Any:
        """A fact about the index, or None."""
        rows = self._all("select value from facts where name = ?", (name,))
        return json.loads(rows[0][0]) if rows else None

    def set_fact(self, name: str, value: Any) -> None:
        """Keep a fact about the index."""
        with self._lock:
            self._db.execute("replace into facts values (?, ?)", (name, json.dumps(value)))

    def files(self) -> dict[str, File]:
        """All known files, by path."""
        found = {}
        for path, stamp, document, reason, depends, notes in self._all(
            "select path, stamp, document, reason, depends, notes from files"
        ):
            found[path] = File(
                path, stamp, document, reason, json.loads(depends), json.loads(notes)
            )
        return found

    def put_file(self, file: File) -> None:
        """Keep what is known of a file."""
        row = (*file[:4], json.dumps(file.depends), json.dumps(file.notes))
        with self._lock:
            self._db.execute("replace into files values (?, ?, ?, ?, ?, ?)", row)

    def drop_file(self, path: str) -> None:
        """Forget a file."""
        with self._lock:
            self._db.execute("delete from files where path = ?", (path,))

    def has_document(self, document: str) -> bool:
        """Whether a document is here."""
        return bool(self._all("select 1 from documents where id = ?", (document,)))

    def put_document(
        self,
        document: str,
        title: str,
        passages: Sequence[Passage],
        room: int,
        count: Callable[[Part], int],
    ) -> None:
        """Keep a document's passages; pictures become files first.

        `room` is how many tokens can be compiled in one pass: behind so many, a passage starts
        afresh and does not know those before it.
        """
        context, used = "", 0
        rows = []
        for number, passage in enumerate(passages):
            tokens = sum(count(part) + 1 for part in passage.parts)
            if used and used + tokens > room:
                context, used = "", 0
            used += tokens
            begins, chunks = context, []
            for part in passage.parts:
                chunk = Chunk((part,), "", context, document)
                chunks.append((chunk.digest, context))
                context = chunk.following
            rows.append(
                (
                    f"{document[:20]}-{number}",
                    document,
                    number,
                    title,
                    passage.text,
                    self.pictures.keep(passage.picture) if passage.picture else None,
                    json.dumps(passage.headings),
                    passage.page,
                    passage.near,
                    begins,
                    json.dumps(chunks),
                    passage.search_text(title),
                )
            )
        with self._lock:
            self._db.execute("replace into documents values (?, ?)", (document, title))
            self._db.executemany(
                "replace into passages values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
            )
            self._revise()

    def drop_unused(self) -> list[str]:
        """Drop documents that no file holds any longer; their caches are to be forgotten."""
        unused = (
            "select id from documents where id not in"
            " (select document from files where document is not null)"
        )
        with self._lock:
            names = [name for (name,) in self._db.execute(unused)]
            for name in names:
                chunks = [chunk for row in self.rows(name) for chunk in row.chunks]
                self._db.executemany("replace into forgotten values (?, ?)", chunks)
                self._db.execute("delete from passages where document = ?", (name,))
                self._db.execute("delete from documents where id = ?", (name,))
                self._revise()
        return names

    def forgotten(self) -> list[tuple[str, str]]:
        """Chunks whose caches are still to be deleted, as (digest, context)."""
        return self._all("select digest, context from forgotten")

    def done_forgetting(self, chunks: Sequence[tuple[str, str]]) -> None:
        """These caches are deleted."""
        with self._lock:
            query = "delete from forgotten where digest = ? and context = ?"
            self._db.executemany(query, chunks)

    def documents(self) -> dict[str, str]:
        """Titles by document."""
        return dict(self._all("select id, title from documents order by rowid"))

    def paths(self) -> dict[str, str]:
        """A path of each document."""
        rows = self._all("select document, path from files where document is not null")
        return dict(rows)

    def rows(self, document: str | None = None) -> list[Row]:
        """Passages, of one document or of all, in reading order."""
        where, values = ("where document = ?", (document,)) if document else ("", ())
        return [
            as_row(values_)
            for values_ in self._all(
                f"select {COLUMNS} from passages {where} order by document, number",
                values,
            )
        ]

    def get(self, ids: Iterable[str]) -> dict[str, Row]:
        """Passages by id; those that are gone are left out."""
        found = {}
        for one in dict.fromkeys(ids):
            for values in self._all(f"select {COLUMNS} from passages where id = ?", (one,)):
                found[one] = as_row(values)
        return found

    def around(self, row: Row, reach: int) -> list[Row]:
        """A passage with so many before and behind it in its document."""
        where = "where document = ? and number between ? and ? order by number"
        values = (row.document, row.number - reach, row.number + reach)
        return [as_row(v) for v in self._all(f"select {COLUMNS} from passages {where}", values)]

    def load(self, document: str) -> list[Chunk]:
        """A document's chunks, with their contents, in reading order."""
        return [chunk for row in self.rows(document) for chunk in self.chunks(row)]

    def chunks(self, row: Row) -> list[Chunk]:
        """A passage's text and picture as they are compiled."""
        parts: list[Part] = [row.text] if row.text else []
        parts += [self.pictures.load(row.picture)] if row.picture else []
        pairs = zip(parts, row.chunks, strict=True)
        return [Chunk((part,), row.id, context, row.document) for part, (_, context) in pairs]

    def compilable(self, document: str) -> list[Document]:
        """A document in pieces that can be compiled in one pass each."""
        windows: list[list[Chunk]] = []
        for chunk in self.load(document):
            if not chunk.context:
                windows.append([])
            windows[-1].append(chunk)
        return [Document(document, tuple(window)) for window in windows]

    def sweep(self) -> int:
        """Remove pictures that no passage shows; returns how many."""
        with self.change():  # another process may have written pictures that no passage shows yet
            shown = self._all("select distinct picture from passages")
            return self.pictures.sweep({name for (name,) in shown})

    @property
    def revision(self) -> int:
        """Grows with every change of the passages."""
        return self.fact("revision") or 0

    def _revise(self) -> None:
        self.set_fact("revision", self.revision + 1)

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()


def identity(title: str, passages: Sequence[Passage]) -> str:
    """What a document is: its content, not its file's name."""
    digest = hashlib.sha256(json.dumps([FORMAT, title]).encode())
    for passage in passages:
        facts = [passage.text, passage.headings, passage.page, passage.near]
        picture = passage.picture.digest if passage.picture else ""
        digest.update(json.dumps([*facts, picture]).encode())
    return digest.hexdigest()
