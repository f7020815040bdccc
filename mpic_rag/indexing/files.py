"""Which files are indexed, and how each kind is read."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

from mpic_rag.documents import Picture
from mpic_rag.indexing.blocks import Block, Content, squeezed
from mpic_rag.indexing.html import read_html
from mpic_rag.indexing.pdf import read_pdf
from mpic_rag.indexing.pictures import LARGE, usable

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
PAGES = {".html", ".htm", ".xhtml"}
TEXTS = {".txt", ".text", ".rst", ".log"}
KINDS = PICTURES | PAGES | TEXTS | {".md", ".markdown", ".pdf", ".docx"}
PDF_LARGE = 2_000_000_000  # bytes
_BLANK = re.compile(r"\n\s*\n")


def walk(path: Path) -> Iterator[Path]:
    """All files of known kinds below a folder, in order; links to folders aren't followed.

    Hidden files and folders are passed over, and links to files outside.
    """
    if not path.is_dir():
        yield path
        return
    root = path.resolve()
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder) / name
            if name.startswith(".") or file.suffix.lower() not in KINDS:
                continue
            if file.is_symlink() and not _inside(file, root):
                continue
            yield file


def _inside(file: Path, root: Path) -> bool:
    try:
        return file.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # leads nowhere, or to itself
        return False


def read_file(path: Path, root: Path, pages_as_pictures: bool = False) -> Content:
    """Read a file of a known kind; raises `ValueError` with the reason, or `OSError`."""
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise ValueError(f"files of kind {kind or path.name!r} are not read")
    size = path.stat().st_size
    if size == 0:
        raise ValueError("empty file")
    if size > (PDF_LARGE if kind == ".pdf" else LARGE):
        raise ValueError(f"larger than {LARGE // 1_000_000} MB")
    if kind == ".pdf":
        content = read_pdf(path, pages_as_pictures)
    elif kind in PICTURES:
        content = _picture(path)
    elif kind in PAGES:
        content = read_html(path.read_bytes(), path.parent, root)
    elif kind == ".docx":
        content = _word(path, root)
    elif kind in TEXTS:
        content = Content(blocks=[Block(squeezed(p)) for p in _BLANK.split(_text(path))])
        content.blocks = [block for block in content.blocks if block.text]
    else:
        page = MarkdownIt("commonmark", {"html": True}).enable("table").render(_text(path))
        content = read_html(page, path.parent, root)
    return content


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error


def _picture(path: Path) -> Content:
    content = Content()
    picture = usable(Picture(path.read_bytes(), path.name), content)
    if picture is None:
        raise ValueError(next(iter(content.notes)))
    name = squeezed(re.sub(r"[_\-.]+", " ", path.stem))
    content.blocks.append(Block("", picture, hint=name))
    return content


def _word(path: Path, root: Path) -> Content:
    try:
        import mammoth
    except ImportError as error:
        raise ValueError(
            "Word files need the extra `docx`: pip install 'mpic-rag[docx]'"
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            page = mammoth.convert_to_html(io.BytesIO(path.read_bytes())).value
        except Exception as error:  # whatever a damaged archive makes of it
            raise ValueError(f"damaged Word file: {error}") from error
    return read_html(page, path.parent, root)
