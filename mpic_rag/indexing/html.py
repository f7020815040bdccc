"""HTML (and what becomes HTML: Markdown, Word) as blocks."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning
from bs4.element import Comment, NavigableString, PreformattedString, Tag

from mpic_rag.indexing.blocks import Block, Content, squeezed
from mpic_rag.indexing.pictures import local_picture

_SKIPPED = frozenset(
    """script style noscript template nav footer aside form button select svg math iframe object
    video audio canvas head""".split()  # noqa: SIM905
)
_SKIPPED_CLASS = re.compile(r"\b(nav(header|footer|bar|igation)?|breadcrumbs?|sidebar|toc)\b", re.I)
_FIGURE_CLASS = re.compile(r"\b((informal)?figure|mediaobject|screenshot|thumb)\b", re.I)
_CAPTION_CLASS = re.compile(r"\b(caption|title|thumbcaption)\b", re.I)
_BLOCKS = frozenset(
    """p li dd dt blockquote pre tr caption figcaption div section article main header table ul ol
    dl figure h1 h2 h3 h4 h5 h6 hr address details summary body""".split()  # noqa: SIM905
)
_HEADINGS = {f"h{n}": n for n in range(1, 7)}


def read_html(text: str | bytes, folder: Path, root: Path) -> Content:
    """Read a page; pictures come from files below `root`, captions stand before their pictures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)  # XHTML is read as browsers do
        soup = BeautifulSoup(text, "lxml")
    reader = _Reader(folder, root)
    if soup.title:
        reader.content.title = squeezed(soup.title.get_text())
    try:
        reader.walk(soup.body or soup)
    except RecursionError as error:
        raise ValueError("the page is nested too deeply") from error
    reader.flush()
    content = reader.content
    content.title = content.title or next((b.text for b in content.blocks if b.heading), "")
    return content


class _Reader:
    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self.content = Content()
        self.headings: dict[int, str] = {}
        self.line: list[str] = []
        self.captions: set[int] = set()  # tags whose text was taken as a caption

    def walk(self, tag: Tag) -> None:
        for child in tag.children:
            if isinstance(child, Tag):
                self.tag(child)
            elif isinstance(child, NavigableString) and not isinstance(
                child, Comment | PreformattedString
            ):
                self.line.append(str(child))

    def tag(self, tag: Tag) -> None:
        name, kind = tag.name.lower(), " ".join(tag.get_attribute_list("class") or [])
        hidden = tag.has_attr("hidden") or tag.get("aria-hidden") == "true"
        if name in _SKIPPED or hidden or id(tag) in self.captions or _SKIPPED_CLASS.search(kind):
            return
        if name == "img":
            self.picture(tag)
        elif name == "br":
            self.line.append("\n")
        elif name in _HEADINGS:
            self.heading(tag, _HEADINGS[name])
        elif name == "pre":
            self.flush()
            code = tag.get_text().strip("\n")
            if code.strip():
                self.content.blocks.append(Block(code, headings=self.path))
        elif name == "tr":
            self.row(tag)
        elif name in _BLOCKS:
            self.flush()
            self.walk(tag)
            self.flush()
        else:
            self.walk(tag)

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.headings[n] for n in sorted(self.headings))

    def flush(self) -> None:
        text = squeezed("".join(self.line))
        self.line = []
        if text:
            self.content.blocks.append(Block(text, headings=self.path))

    def heading(self, tag: Tag, level: int) -> None:
        self.flush()
        text = squeezed(tag.get_text())
        if text:
            self.headings = {n: h for n, h in self.headings.items() if n < level}
            self.headings[level] = text
            self.content.blocks.append(Block(text, headings=self.path, heading=True))

    def row(self, tag: Tag) -> None:
        """A table's row in one line, its pictures behind it."""
        self.flush()
        if tag.find("tr"):  # a table for layout
            self.walk(tag)
            self.flush()
            return
        cells = [squeezed(cell.get_text()) for cell in tag.find_all(["td", "th"])]
        if any(cells):
            self.line.append(" | ".join(cell for cell in cells if cell))
            self.flush()
        for picture in tag.find_all("img"):
            self.picture(picture)

    def picture(self, tag: Tag) -> None:
        source = str(tag.get("src") or tag.get("data-src") or "")
        if not source:
            return
        picture = local_picture(source, self.folder, self.root, self.content)
        if picture is None:
            return
        self.flush()
        hint = squeezed(f"{tag.get('alt') or ''} {tag.get('title') or ''}")
        block = Block(self.caption(tag), picture, self.path, hint=hint)
        self.content.blocks.append(block)

    def caption(self, tag: Tag) -> str:
        """The caption of the figure around a picture, which is then not read again."""
        for around in list(tag.parents)[:5]:
            kind = " ".join(around.get_attribute_list("class") or [])
            if around.name != "figure" and not _FIGURE_CLASS.search(kind):
                continue
            for inside in around.find_all(True):
                own = " ".join(inside.get_attribute_list("class") or [])
                if inside.name == "figcaption" or _CAPTION_CLASS.search(own):
                    if id(inside) in self.captions or inside.find("img"):
                        continue
                    self.captions.add(id(inside))
                    self._unread(inside)
                    return squeezed(inside.get_text())
        return ""

    def _unread(self, tag: Tag) -> None:
        """A caption above its picture was read as a paragraph: take that back."""
        text, blocks = squeezed(tag.get_text()), self.content.blocks
        if blocks and blocks[-1].text == text and not blocks[-1].picture:
            blocks.pop()
