"""PDF as blocks: text by page, embedded figures with their captions, pages that are pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from mpic_rag.documents import Picture
from mpic_rag.indexing.blocks import Block, Content, squeezed
from mpic_rag.indexing.pictures import usable

SCALE = 110 / 72  # dots per point of a page's picture
SPARSE = 32  # characters of text below which a page is shown as a picture
FIGURE = 0.02  # of the page's area; smaller pictures are decoration
_CAPTION = re.compile(r"\s*(figure|fig\.|table|abb\.|abbildung|image|plate)\s*[\divx]+", re.I)
_GAP = re.compile(r"\n\s*\n")


def read_pdf(path: Path, pages_as_pictures: bool = False) -> Content:
    """Read a PDF; raises `ValueError` where it is encrypted, damaged or empty."""
    content = Content()
    try:
        document = pdfium.PdfDocument(path)
    except pdfium.PdfiumError as error:
        locked = "password" in str(error).lower()
        raise ValueError("encrypted, needs a password" if locked else "damaged PDF") from error
    try:
        if len(document) == 0:
            raise ValueError("PDF without pages")
        content.title = squeezed(document.get_metadata_dict().get("Title", ""))
        for number in range(len(document)):
            try:
                content.blocks += _page(document[number], number + 1, content, pages_as_pictures)
            except pdfium.PdfiumError:
                content.note("page is damaged")
    finally:
        document.close()
    return content


def render(path: Path, number: int, scale: float = SCALE) -> Picture:
    """A page, counted from 1, as a picture."""
    document = pdfium.PdfDocument(path)
    try:
        return _render(document[number - 1], scale)
    finally:
        document.close()


def _page(page: pdfium.PdfPage, number: int, content: Content, as_picture: bool) -> Iterator[Block]:
    text_page = page.get_textpage()
    text = text_page.get_text_bounded().replace("\r\n", "\n")
    figures = list(_figures(page, text_page, content))
    captions = {caption for _, caption in figures if caption}
    for paragraph in _paragraphs(text):
        if paragraph not in captions:
            yield Block(paragraph, page=number)
    for picture, caption in figures:
        yield Block(caption, picture, page=number)
    if as_picture or (len(text.strip()) < SPARSE and not figures):
        whole = usable(_render(page, SCALE), content)
        if whole:
            yield Block("", whole, page=number)


def _render(page: pdfium.PdfPage, scale: float) -> Picture:
    width, height = page.get_size()
    scale = min(scale, 2000 / max(width, height, 1))  # a page may say that it is a mile wide
    return Picture.of(page.render(scale=scale).to_pil().convert("RGB"), "page")


def _figures(
    page: pdfium.PdfPage, text_page: pdfium.PdfTextPage, content: Content
) -> Iterator[tuple[Picture, str]]:
    width, height = page.get_size()
    area = max(width * height, 1)
    for image in page.get_objects(filter=[pdfium_c.FPDF_PAGEOBJ_IMAGE], max_depth=4):
        left, bottom, right, top = image.get_bounds()
        if (right - left) * (top - bottom) < FIGURE * area:
            continue
        try:
            pixels = image.get_bitmap(render=False).to_pil().convert("RGB")
        except (pdfium.PdfiumError, ValueError, RuntimeError):
            content.note("figure is damaged")
            continue
        picture = usable(Picture.of(pixels, "figure"), content)
        if picture:
            yield picture, _caption(text_page, left, bottom, right, top, height)


def _caption(
    text_page: pdfium.PdfTextPage,
    left: float,
    bottom: float,
    right: float,
    top: float,
    height: float,
) -> str:
    """The paragraph below a figure, or above it, if it starts like a caption."""
    below = text_page.get_text_bounded(left - 36, max(0, bottom - 60), right + 36, bottom + 2)
    above = text_page.get_text_bounded(left - 36, top - 2, right + 36, min(height, top + 48))
    for text in (below, above):
        for paragraph in _paragraphs(text.replace("\r\n", "\n")):
            if _CAPTION.match(paragraph):
                return paragraph
    return ""


def _paragraphs(text: str) -> list[str]:
    """Split at empty lines and where a line ends a sentence well before the others do."""
    paragraphs: list[str] = []
    for block in _GAP.split(text):
        lines = [line.strip() for line in block.split("\n") if line.strip()]
        longest = max(map(len, lines), default=0)
        run: list[str] = []
        for line in lines:
            if run and _CAPTION.match(line):
                paragraphs.append(_joined(run))
                run = []
            run.append(line)
            if line[-1] in ".:!?" and len(line) < 0.8 * longest:
                paragraphs.append(_joined(run))
                run = []
        if run:
            paragraphs.append(_joined(run))
    return [p for p in paragraphs if p]


def _joined(lines: list[str]) -> str:
    """Lines as one paragraph, words that were cut at their ends whole again."""
    text = ""
    for line in lines:
        cut = text.endswith(("\ufffe", "\u00ad", "\x02")) or (
            len(text) > 1 and text[-1] == "-" and text[-2].isalpha() and line[0].islower()
        )
        text = text[:-1] + line if cut else f"{text} {line}"
    return squeezed(text)
