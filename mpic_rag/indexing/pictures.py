"""Pictures that a page shows: which may be read, which are worth keeping."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mpic_rag.documents import Picture
from mpic_rag.indexing.blocks import Content

SMALL = 32  # pixels; below it, a picture is an icon or a line
LARGE = 64_000_000  # bytes of one file
_DATA = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


def local_picture(source: str, folder: Path, root: Path, content: Content) -> Picture | None:
    """The picture that `source` names, as seen from `folder`; what can't be used is noted.

    Nothing is fetched from the web, and nothing is read from outside of `root`.
    """
    if found := _DATA.match(source):
        try:
            data = base64.b64decode(source[found.end() :], validate=True)
        except (binascii.Error, ValueError):
            return content.without("picture inside the page is damaged")
        return usable(Picture(data, "embedded picture"), content)
    parts = urlsplit(source)
    if parts.scheme or parts.netloc:
        return content.without("picture on the web, not fetched")
    path = folder / unquote(parts.path)
    try:
        real = path.resolve()
        if not real.is_relative_to(root.resolve()):
            return content.without("picture outside of the indexed folder, not read")
        content.depends.add(str(real))
        if real.suffix.lower() in {".svg", ".svgz"}:
            return content.without("SVG picture, not supported")
        if not real.is_file():
            return content.without("picture is missing")
        if real.stat().st_size > LARGE:
            return content.without("picture file above 64 MB")
        return usable(Picture(real.read_bytes(), real.name), content)
    except (OSError, ValueError, RuntimeError):  # a loop of links, a name that can't be one
        return content.without("picture can't be read")


def usable(picture: Picture, content: Content) -> Picture | None:
    """The picture, unless it is broken, too large to open, or no more than an icon."""
    try:
        image = picture.decode()
    except ValueError as error:
        what = "more pixels than is safe" if "pixels" in str(error) else "damaged or unknown"
        return content.without(f"picture is {what}")
    if min(image.size) < SMALL:
        return content.without("icon, too small to show anything")
    return picture
