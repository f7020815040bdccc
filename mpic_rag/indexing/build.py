"""Bring an index up to date with its files: read, embed, compile; each step can be interrupted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpic_rag.engine import Engine
from mpic_rag.indexing.blocks import Block, Content
from mpic_rag.indexing.collection import Collection, identity
from mpic_rag.indexing.files import PICTURES, read_file, walk
from mpic_rag.indexing.passages import CHARACTERS, Passage, opening, passages
from mpic_rag.indexing.rows import File
from mpic_rag.store.entry import StoreError

Progress = Callable[[str, int, int], None]  # what, done, of how many
_READER = 2  # raise it, and every file is read again


@dataclass
class Report:
    """What an update found and did; `skipped` are (path, reason), `notes` counted details."""

    files: Counter[str] = field(default_factory=Counter)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    documents: int = 0
    passages: int = 0
    chunks: int = 0
    compiled: int = 0
    deleted: int = 0
    uncompiled: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """How files become passages; other options read all files anew."""

    characters: int = CHARACTERS
    pages_as_pictures: bool = False
    pictures: bool = True  # whether the model can see them

    @property
    def name(self) -> str:
        """What files' stamps begin with."""
        return f"{_READER}:{self.characters}:{self.pages_as_pictures:d}:{self.pictures:d}"


def read(
    collection: Collection,
    roots: Sequence[Path],
    options: Options,
    engine: Engine,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Make the collection's documents those of the files below `roots`.

    A file is read if it, or a picture that it shows, has another size, time or place than before.
    One that can't be read is skipped with its reason, and tried again when it changes.
    """
    report = Report()
    known = collection.files()
    found = {str(path): (path, root) for root in roots for path in _files(root)}
    shown: set[str] = set()  # pictures that pages show are not documents of their own
    pages_first = sorted(found, key=lambda name: found[name][0].suffix.lower() in PICTURES)
    for done, name in enumerate(pages_first):
        path, root = found[name]
        progress("Reading", done, len(pages_first))
        if path.suffix.lower() in PICTURES and str(path.resolve()) in shown:
            del found[name]
            continue
        before = known.get(name)
        if before and before.stamp == stamp(path, before.depends, options):
            file, state = before, "unchanged"
        else:
            file, content = _read(path, root, options)
            state = "changed" if before else "new"
            if file.document and not before and _moved(file.document, known, found):
                state = "renamed"
            with collection.change():
                collection.put_file(file)
                if file.document and not collection.has_document(file.document):
                    collection.put_document(
                        file.document, *content, engine.room, engine.model.count
                    )
        shown.update(file.depends)
        report.files["skipped" if file.reason else state] += 1
        if file.reason:
            report.skipped.append((name, file.reason))
        report.notes.update(file.notes)
    gone = [name for name in known if name not in found]
    with collection.change():
        for name in gone:
            collection.drop_file(name)
        collection.drop_unused()
    collection.sweep()
    holders = Counter(file.document for file in collection.files().values() if file.document)
    report.files["deleted"] = len(gone) - report.files["renamed"]
    report.files["duplicate"] = sum(count - 1 for count in holders.values())
    rows = collection.rows()
    report.documents = len({row.document for row in rows})
    report.passages, report.chunks = len(rows), sum(len(row.chunks) for row in rows)
    progress("Reading", len(pages_first), len(pages_first))
    return report


def stamp(path: Path, depends: Iterable[str], options: Options) -> str:
    """Changes whenever a file or one that it depends on does; reads no contents."""
    digest = hashlib.sha256(options.name.encode())
    for name in [str(path), *sorted(depends)]:
        try:
            state = Path(name).stat()
            digest.update(f"{state.st_size} {state.st_mtime_ns} {state.st_ino}|".encode())
        except (OSError, ValueError):
            digest.update(b"-|")
    return digest.hexdigest()


def compile_missing(
    collection: Collection,
    engine: Engine,
    report: Report,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Compile what the store lacks, document by document, and delete what no document has."""
    library = engine.libraries[0]
    rows = collection.rows()
    documents: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        documents.setdefault(row.document, []).extend(row.chunks)
    live = {key(engine, chunk) for chunks in documents.values() for chunk in chunks}
    gone = collection.forgotten()
    dead = [k for k in (key(engine, chunk) for chunk in gone) if k not in live]
    if gone:
        report.deleted = library.delete(dead)
        collection.done_forgetting(gone)
    for done, (name, chunks) in enumerate(documents.items()):
        progress("Compiling", done, len(documents))
        if all(library.contains(key(engine, chunk)) for chunk in chunks):
            continue
        try:
            report.compiled += engine.compile(collection.compilable(name))
        except (ValueError, OSError, StoreError) as error:
            report.uncompiled.append((name, str(error)))
    progress("Compiling", len(documents), len(documents))


def key(engine: Engine, chunk: tuple[str, str]) -> str:
    """The key of a chunk's cache, by its digest and context."""
    return engine.compiler.key_of(*chunk, engine.libraries[0])


def _files(root: Path) -> Iterable[Path]:
    if not root.exists():
        raise ValueError(f"there is no file or folder {root}")
    return walk(root)


def _read(path: Path, root: Path, options: Options) -> tuple[File, tuple[str, list[Passage]]]:
    inside = root if root.is_dir() else root.parent
    title, made, depends, notes, document, reason = "", [], [], {}, None, ""
    before = stamp(path, (), options)
    try:
        content = read_file(path, inside, options.pages_as_pictures)
        if not options.pictures:
            content.blocks = [_readable(block, content) for block in content.blocks]
        made = passages(content, options.characters)
        title = content.title or opening(content)
        depends, notes = sorted(content.depends), content.notes
        if made:
            document = identity(title, made)
        else:
            reason = "holds no text and no picture"
    except (ValueError, OSError) as error:
        reason = str(error.strerror or error) if isinstance(error, OSError) else str(error)
    except MemoryError:
        reason = "too large for this machine's memory"
    # A file that changes while it is read is read again next time.
    same = before == stamp(path, (), options)
    mark = stamp(path, depends, options) if same else ""
    return File(str(path), mark, document, reason, depends, notes), (title, made)


def _readable(block: Block, content: Content) -> Block:
    """A picture's caption, for a model that reads texts only."""
    if not block.picture:
        return block
    content.note("picture, which this model can't see")
    return replace(block, text=block.text or block.hint, picture=None)


def _moved(document: str, known: dict[str, File], found: Container[str]) -> bool:
    return any(f.document == document and f.path not in found for f in known.values())
