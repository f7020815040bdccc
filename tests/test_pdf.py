"""PDFs, written byte by byte, as blocks."""

import pytest

from mpic_rag.indexing.files import read_file
from mpic_rag.indexing.pdf import render


def pdf(pages, encrypt=False, title="A guide"):
    """A PDF of pages; each a list of ("text", x, y, words) or ("picture", x, y, size)."""
    objects = {1: b"<</Type/Catalog/Pages 2 0 R>>"}
    objects[3] = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
    pixels = bytes([200, 30, 40]) * (64 * 64)
    head = b"<</Type/XObject/Subtype/Image/Width 64/Height 64/ColorSpace/DeviceRGB"
    objects[4] = (
        head + b"/BitsPerComponent 8/Length %d>>\nstream\n" % len(pixels) + pixels + b"\nendstream"
    )
    objects[5] = b"<</Title(%s)>>" % title.encode()
    kids = []
    for page in pages:
        lines = []
        for kind, x, y, what in page:
            if kind == "text":
                lines.append(f"BT /F1 11 Tf {x} {y} Td ({what}) Tj ET")
            else:
                lines.append(f"q {what} 0 0 {what} {x} {y} cm /I1 Do Q")
        stream = "\n".join(lines).encode()
        body, place = len(objects) + 2, len(objects) + 3
        objects[body] = b"<</Length %d>>\nstream\n%s\nendstream" % (len(stream), stream)
        objects[place] = (
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents %d 0 R"
            b"/Resources<</Font<</F1 3 0 R>>/XObject<</I1 4 0 R>>>>>>" % body
        )
        kids.append(place)
    refs = b" ".join(b"%d 0 R" % kid for kid in kids)
    objects[2] = b"<</Type/Pages/Kids[%s]/Count %d>>" % (refs, len(kids))
    out, offsets = b"%PDF-1.4\n", {}
    for number in sorted(objects):
        offsets[number] = len(out)
        out += b"%d 0 obj\n%s\nendobj\n" % (number, objects[number])
    start = len(out)
    last = max(objects)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (last + 1)
    for number in range(1, last + 1):
        out += (
            b"%010d 00000 n \n" % offsets[number] if number in offsets else b"0000000000 00000 f \n"
        )
    locked = b""
    if encrypt:
        locked = b"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O(%s)/U(%s)>>/ID[(a)(a)]" % (
            b"o" * 32,
            b"u" * 32,
        )
    out += b"trailer\n<</Size %d/Root 1 0 R/Info 5 0 R%s>>\nstartxref\n%d\n%%%%EOF" % (
        last + 1,
        locked,
        start,
    )
    return out


def blocks(path, **kwargs):
    content = read_file(path, path.parent, **kwargs)
    return content, [(b.text, bool(b.picture), b.page) for b in content.blocks]


def test_text_and_figures_by_page(tmp_path):
    path = tmp_path / "a.pdf"
    first = [
        ("text", 72, 700, "The harbour of Amber has three piers and a light that turns"),
        ("text", 72, 686, "once in twelve seconds, as sailors know."),
        ("picture", 72, 480, 160),
        ("text", 72, 465, "Figure 1. The red pier."),
    ]
    second = [("text", 72, 700, "Ships call on Mondays and on every second Thursday of a month.")]
    path.write_bytes(pdf([first, second]))
    content, found = blocks(path)
    assert content.title == "A guide"
    texts = [text for text, shown, _ in found if not shown]
    assert "The harbour of Amber has three piers and a light that turns" in texts[0]
    assert "sailors know." in " ".join(texts)
    assert ("Figure 1. The red pier.", True, 1) in found
    assert "Figure 1. The red pier." not in texts
    assert found[-1] == (
        "Ships call on Mondays and on every second Thursday of a month.",
        False,
        2,
    )


def test_pages_without_text_are_pictures(tmp_path):
    path = tmp_path / "scan.pdf"
    path.write_bytes(pdf([[("picture", 10, 10, 20)]]))
    content, found = blocks(path)
    assert found == [("", True, 1)]
    assert content.blocks[0].picture.decode().size == (935, 1210)
    path.write_bytes(pdf([[("text", 72, 700, "Enough words to make a text of the page, surely.")]]))
    assert [shown for _, shown, _ in blocks(path)[1]] == [False]
    assert [shown for _, shown, _ in blocks(path, pages_as_pictures=True)[1]] == [False, True]
    assert render(path, 1).decode().size == (935, 1210)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pdf([[]], encrypt=True), "encrypted"),
        (pdf([[("text", 9, 9, "x")]])[:300], "damaged"),
        (pdf([]), "without pages|damaged"),
        (b"%PDF-1.7\n" + b"\x00" * 100, "damaged"),
    ],
)
def test_bad_pdfs(tmp_path, data, reason):
    (tmp_path / "bad.pdf").write_bytes(data)
    with pytest.raises(ValueError, match=reason):
        read_file(tmp_path / "bad.pdf", tmp_path)
