"""What is retrieved: pictures and texts in chunks, chunks in documents, documents in Markdown."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

_IMAGE = re.compile(r"!\[[^\]]*\]\((?!\w+://)([^)\s]+)\)")  # pictures on the web stay text
_VIDEO_OR_AUDIO = {".mp4", ".mov", ".avi", ".mkv", ".webm", ".mp3", ".wav", ".flac", ".ogg"}
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")  # none that runs another program
_PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}


@dataclass(frozen=True)
class Picture:
    """An encoded picture; `data` is the file's bytes, `name` is for messages only."""

    data: bytes
    name: str = "picture"

    @classmethod
    def load(cls, path: str | Path) -> Picture:
        """Read a picture file; raises `ValueError` where it can't be read or decoded."""
        path = Path(path)
        try:
            picture = cls(path.read_bytes(), path.name)
        except OSError as error:
            raise ValueError(f"can't read {path}: {error.strerror}") from error
        picture.decode()
        return picture

    @classmethod
    def of(cls, image: Image.Image, name: str = "picture") -> Picture:
        """Wrap a PIL image; equal pixels give equal bytes, so they find the same cache."""
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return cls(buffer.getvalue(), name)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the encoded bytes, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    def decode(self) -> Image.Image:
        """Return upright RGB pixels; raises `ValueError` for a broken or oversized picture."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                warnings.filterwarnings("ignore", "Palette images with Transparency")
                with Image.open(io.BytesIO(self.data), formats=_FORMATS) as image:
                    return ImageOps.exif_transpose(image).convert("RGB")
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ValueError(
                f"{self.name} has more than {Image.MAX_IMAGE_PIXELS:,} pixels; scale it down first"
            ) from error
        except UnidentifiedImageError as error:
            formats = ", ".join(_FORMATS)
            raise ValueError(
                f"{self.name} is not a picture that can be read: none of {formats}"
            ) from error
        # Pillow's decoders raise whatever a damaged file makes them raise.
        except (OSError, SyntaxError, ValueError, EOFError, OverflowError) as error:
            raise ValueError(f"{self.name} is not a picture that can be read: {error}") from error


Part = str | Picture


@dataclass(frozen=True)
class Chunk:
    """A retrievable piece: texts and pictures in reading order.

    `context` digests what its document says before it ("" for a first or lone chunk): it is part
    of the key of a KV that was compiled in that context. `source` names the chunk to people,
    `document` is what its entries are deleted with.
    """

    parts: tuple[Part, ...]
    source: str = "chunk"
    context: str = ""
    document: str = ""

    def __post_init__(self) -> None:
        if not any(isinstance(part, Picture) or part.strip() for part in self.parts):
            raise ValueError(f"{self.source} is empty: a chunk needs a text or a picture")

    @classmethod
    def of(cls, *parts: Part, source: str = "chunk") -> Chunk:
        """Build a chunk that belongs to no document."""
        return cls(tuple(parts), source)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the parts, each with its kind and length, in hexadecimal."""
        digest = hashlib.sha256()
        for part in self.parts:
            kind, data = ("i", part.data) if isinstance(part, Picture) else ("t", part.encode())
            digest.update(f"{kind}{len(data)}:".encode() + data)
        return digest.hexdigest()

    @property
    def following(self) -> str:
        """The context of the chunk that follows in the document."""
        return hashlib.sha256(f"{self.context}{self.digest}".encode()).hexdigest()

    @property
    def text(self) -> str:
        """The chunk as text, with `[name]` in place of each picture."""
        return " ".join(p if isinstance(p, str) else f"[{p.name}]" for p in self.parts)


Content = Sequence[Part | Chunk]  # of a message, in order


def orphans(chunks: Iterable[Chunk]) -> set[int]:
    """Which of retrieved chunks stand without the one before them in their document."""
    found, contexts = set(), {""}
    for i, chunk in enumerate(chunks):
        if chunk.context not in contexts:
            found.add(i)
        contexts.add(chunk.following)
    return found


@dataclass(frozen=True)
class Document:
    """Chunks in reading order; each knows what stands before it."""

    name: str
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        if not self.chunks:
            raise ValueError(f"document {self.name} is empty")
        context = ""
        for chunk in self.chunks:
            if chunk.context != context:
                raise ValueError(f"{chunk.source} is out of its context: use `Document.of`")
            context = chunk.following

    @classmethod
    def of(cls, name: str, chunks: Iterable[Iterable[Part]]) -> Document:
        """Build a document from the parts of its chunks."""
        made: list[Chunk] = []
        context = ""
        for index, parts in enumerate(chunks):
            chunk = Chunk(tuple(parts), f"{name}#{index}", context, name)
            context = chunk.following
            made.append(chunk)
        return cls(name, tuple(made))

    @classmethod
    def read(cls, path: str | Path) -> Document:
        """Read a Markdown, text or picture file.

        A paragraph (text between blank lines) is a chunk; `![alt](file.png)` in it is a picture,
        which must lie in the document's own folder or below it. Raises `ValueError`.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        if path.suffix.lower() in _VIDEO_OR_AUDIO:
            raise ValueError(
                f"{path.name} is video or audio; only texts and pictures are supported"
            )
        if path.suffix.lower() in _PICTURES:
            return cls.of(path.stem, [[Picture.load(path)]])
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is neither a picture nor UTF-8 text") from error
        blocks = [block for block in re.split(r"\n\s*\n", text) if block.strip()]
        if not blocks:
            raise ValueError(f"{path} is empty")
        return cls.of(path.stem, [_parts(block, path.parent) for block in blocks])


def read_folder(folder: str | Path) -> list[Document]:
    """Read every `.md` and `.txt` below a folder, in the order of their paths.

    Hidden folders, and links that lead out of the folder, are passed over.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    root = folder.resolve()
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in {".md", ".txt"}
        and path.is_file()
        and path.resolve().is_relative_to(root)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not paths:
        raise ValueError(f"{folder} holds no .md or .txt file")
    return [Document.read(path) for path in paths]


def _parts(block: str, folder: Path) -> list[Part]:
    """Split a Markdown paragraph at its pictures."""
    parts: list[Part] = []
    for index, piece in enumerate(_IMAGE.split(block)):
        if index % 2 == 0:
            parts += [piece.strip()] if piece.strip() else []
            continue
        file = (folder / piece).resolve()
        if not file.is_relative_to(folder.resolve()):
            raise ValueError(f"picture {piece} lies outside the document's folder {folder}")
        parts.append(Picture.load(file))
    return parts
