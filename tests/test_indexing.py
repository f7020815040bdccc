"""Files become passages; changed files become changed passages, and nothing else."""

import os
import shutil
import time
from collections import Counter

import pytest
from PIL import Image
from tiny import picture

from mpic_rag.index import Index
from mpic_rag.indexing.build import Options
from mpic_rag.indexing.files import read_file, walk
from mpic_rag.indexing.passages import opening, passages

PAGE = """<html><head><title>Piers</title><style>p{}</style></head><body>
<nav>Home | About</nav><h1>Piers of Amber</h1><p>There are <b>three</b> piers.</p>
<figure><img src="red.png" alt="a red pier">
<figcaption>Figure 1. The red pier.</figcaption></figure>
<h2>Ships</h2><ul><li>The mail boat</li><li>The ferry</li></ul>
<table><tr><th>Ship</th><th>Day</th></tr><tr><td>Ferry</td><td>Monday</td></tr></table>
<p>It is <img src="red.png"> here.</p><script>alert(1)</script></body></html>"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    return folder


@pytest.fixture
def red(folder):
    (folder / "red.png").write_bytes(picture((56, 56), "red").data)
    return folder / "red.png"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def blocks(path, root=None):
    content = read_file(path, root or path.parent)
    return [(b.text, bool(b.picture)) for b in content.blocks]


def test_first_words_stand_for_a_title(folder):
    def called(text):
        return opening(read_file(write(folder / "a.txt", text), folder))

    assert called("amber lies by the sea. fog is common.\n\nits keeper is maria.") == (
        "amber lies by the sea."
    )
    long = called("word " * 90)
    assert len(long) <= 82
    assert long.endswith("word …")
    assert called("x" * 300) == "x" * 80 + " …"


def test_html(folder, red):
    content = read_file(write(folder / "a.html", PAGE), folder)
    assert content.title == "Piers"
    assert [(b.text, bool(b.picture)) for b in content.blocks] == [
        ("Piers of Amber", False),
        ("There are three piers.", False),
        ("Figure 1. The red pier.", True),
        ("Ships", False),
        ("The mail boat", False),
        ("The ferry", False),
        ("Ship | Day", False),
        ("Ferry | Monday", False),
        ("It is", False),
        ("", True),
        ("here.", False),
    ]
    figure = content.blocks[2]
    assert figure.hint == "a red pier"
    assert content.blocks[4].headings == ("Piers of Amber", "Ships")
    assert content.depends == {str(red.resolve())}


def test_markdown_and_text(folder, red):
    markdown = (
        "# Amber\n\nThree *piers*.\n\n![a pier](red.png)\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    )
    assert blocks(write(folder / "a.md", markdown)) == [
        ("Amber", False),
        ("Three piers.", False),
        ("", True),
        ("a | b", False),
        ("1 | 2", False),
    ]
    assert blocks(write(folder / "a.txt", "one\ntwo\n\n\nthree\n")) == [
        ("one two", False),
        ("three", False),
    ]


def test_word(folder):
    docx = pytest.importorskip("docx")
    document = docx.Document()
    document.add_heading("Amber", 1)
    document.add_paragraph("Three piers.")
    path = folder / "pier.png"
    path.write_bytes(picture((64, 64), "blue").data)
    document.add_picture(str(path))
    document.save(folder / "a.docx")
    assert blocks(folder / "a.docx") == [
        ("Amber", False),
        ("Three piers.", False),
        ("", True),
    ]


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "gif", "tiff"])
def test_pictures(folder, kind):
    Image.new("RGB", (64, 48), "red").save(folder / f"red_pier.{kind}")
    content = read_file(folder / f"red_pier.{kind}", folder)
    assert [(b.text, bool(b.picture), b.hint) for b in content.blocks] == [("", True, "red pier")]


@pytest.mark.parametrize(
    ("source", "note"),
    [
        ("../../../../etc/passwd", "outside"),
        ("/etc/passwd", "outside"),
        ("file:///etc/passwd", "web"),
        ("https://example.invalid/a.png", "web"),
        ("//example.invalid/a.png", "web"),
        ("gone.png", "missing"),
        ("data:image/png;base64,AAAA", "damaged"),
        ("icon.png", "icon"),
        ("a.svg", "SVG"),
        ("link.png", "outside"),
        ("x" * 5000 + ".png", "picture"),
        ("%00.png", "picture"),
    ],
)
def test_pictures_that_are_left_out(folder, tmp_path, source, note):
    Image.new("RGB", (16, 16)).save(folder / "icon.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "secret.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    page = write(folder / "a.html", f'<p>text</p><img src="{source}">')
    content = read_file(page, folder)
    assert not [b for b in content.blocks if b.picture]
    ((what, count),) = content.notes.items()
    assert note in what
    assert count == 1


def test_headings_stand_with_what_follows(folder):
    page = "# A\n\n## B\n\n" + "word " * 30 + "\n\n" + "next " * 30 + "\n\n# C\n\nend"
    content = read_file(write(folder / "a.md", page), folder)
    made = passages(content, 200)
    assert [p.text.split("\n")[0] for p in made] == ["A", "next " * 29 + "next", "C"]
    assert made[0].text.startswith("A\nB\nword")
    assert made[-1].headings == ("C",)


def test_passages_keep_every_word(folder):
    text = " ".join(f"w{n}{'.' if n % 17 == 0 else ''}" for n in range(3000))
    content = read_file(write(folder / "a.txt", f"{text}\n\n{'x' * 9000}"), folder)
    made = passages(content)
    assert " ".join(p.text for p in made).replace(" ", "").replace("\n", "") == (
        text.replace(" ", "") + "x" * 9000
    )
    assert max(len(p.text) for p in made) <= 1700
    assert len(passages(content, 0)) >= 2


def test_figures_keep_what_is_said_around_them(folder, red):
    content = read_file(write(folder / "a.html", PAGE), folder)
    figure = next(p for p in passages(content) if p.picture)
    text = figure.search_text(content.title)
    for words in ("Piers of Amber", "Figure 1", "a red pier", "three piers", "Ships"):
        assert words in text


# An index, brought up to date.


@pytest.fixture
def index(tmp_path, text_model, make_engine):
    return Index(tmp_path / "index", engine=make_engine(text_model), create=True, pictures="none")


def pages(folder, numbers):
    for n in numbers:
        write(
            folder / f"p{n}.md",
            f"# Page {n}\n\nstation {n} ships goods{n}.\n\nits keeper is k{n}.\n",
        )


def found(index, words):
    return [f.row.text for f in index.retrieve(words)]


def keys(index):
    library = index.engine.libraries[0]
    return {row.key for row in library.rows()}


def wanted(index):
    from mpic_rag.indexing.build import key

    return {key(index.engine, c) for row in index.collection.rows() for c in row.chunks}


def test_only_what_changed_is_done_again(index, folder):
    pages(folder, range(40))
    report = index.update([folder], Options(0))
    assert report.files["new"] == 40
    assert report.compiled == report.chunks == 80
    assert keys(index) == wanted(index)
    again = index.update()
    assert (again.files["unchanged"], again.compiled, again.deleted) == (40, 0, 0)

    pages(folder, range(100, 150))
    for n in range(20):
        (folder / f"p{n}.md").unlink()
    for n in range(20, 30):
        path = folder / f"p{n}.md"
        path.write_text(path.read_text().replace("keeper", "guard"))
    for n in range(30, 40):
        (folder / f"p{n}.md").rename(folder / f"moved{n}.md")
    report = index.update()
    counts = {k: v for k, v in report.files.items() if v}
    assert counts == {"new": 50, "changed": 10, "renamed": 10, "deleted": 20}
    # Of a changed page, what stands before the change is as it was.
    assert report.compiled == 50 * 2 + 10
    assert report.deleted == 20 * 2 + 10
    assert keys(index) == wanted(index)
    assert not any("goods3." in text for text in found(index, "goods3"))
    assert any("guard is k25" in text for text in found(index, "guard k25"))
    assert found(index, "goods120")[0].endswith("station 120 ships goods120.")


def test_touched_copied_and_same_pictures(index, folder):
    pages(folder, range(3))
    index.update([folder])
    os.utime(folder / "p1.md", (1, 1))
    shutil.copy(folder / "p2.md", folder / "copy.md")
    report = index.update()
    assert report.compiled == 0
    assert report.files["duplicate"] == 1
    (folder / "p2.md").unlink()
    report = index.update()
    assert report.deleted == 0
    assert found(index, "goods2")
    (folder / "copy.md").unlink()
    assert index.update().deleted > 0
    assert not found(index, "goods2")


def test_a_picture_that_changed_changes_its_page(tmp_path, vision_model, make_engine, folder, red):
    engine = make_engine(vision_model)
    index = Index(tmp_path / "index", engine=engine, create=True, pictures="none")
    write(folder / "a.html", '<p>the pier</p><img src="red.png">')
    index.update([folder / "a.html"])
    before = [row.picture for row in index.collection.rows() if row.picture]
    time.sleep(0.01)
    red.write_bytes(picture((56, 56), "blue").data)
    report = index.update()
    assert report.files["changed"] == 1
    after = [row.picture for row in index.collection.rows() if row.picture]
    assert before != after
    assert keys(index) == wanted(index)
    assert [p.name for p in (tmp_path / "index" / "pictures").glob("*/*")] == after


def test_a_page_of_two_documents_survives_one(index, folder):
    """Equal contents share a cache; it goes with the last of them."""
    write(folder / "a.md", "the same words\n\nand then others")
    write(folder / "b.md", "the same words\n\nbut then different ones")
    index.update([folder], Options(0))
    (folder / "a.md").unlink()
    index.update()
    assert keys(index) == wanted(index)
    assert len(keys(index)) == 2


def test_long_documents_are_compiled_in_pieces(index, folder):
    text = "\n\n".join(f"paragraph {n} " + "word " * 60 for n in range(60))
    write(folder / "long.txt", text)
    report = index.update([folder])
    assert not report.uncompiled
    windows = index.collection.compilable(next(iter(index.collection.documents())))
    assert len(windows) > 1
    assert keys(index) == wanted(index)


def test_paths_are_added_and_forgotten(index, folder, tmp_path):
    pages(folder, [1])
    other = write(tmp_path / "other.txt", "another text of words")
    index.update([folder])
    index.update([other])
    assert found(index, "another text")
    assert found(index, "goods1")
    index.forget(other)
    index.update()
    assert not found(index, "another text")
    with pytest.raises(ValueError, match="is not among"):
        index.forget(other)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="--forget"):
        index.update()


def test_bad_files_are_skipped_with_a_reason(index, folder):
    pages(folder, [1])
    (folder / "empty.md").touch()
    (folder / "latin.txt").write_bytes("Stra\u00dfe".encode("latin-1"))
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 40)
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (folder / "broken.docx").write_bytes(b"PK\x03\x04 nothing")
    write(folder / "blank.html", "<html><body> <script>x</script></body></html>")
    write(folder / "deep.html", "<div>" * 5000 + "deep down" + "</div>" * 5000)
    write(folder / "line\nbreak.md", "a name with a newline")
    (folder / "loop.md").symlink_to(folder / "loop.md")
    (folder / "around").symlink_to(folder)
    (folder / "out.md").symlink_to("/etc/hostname")
    (folder / ".hidden.md").write_text("hidden")
    report = index.update([folder])
    reasons = {path.split("/")[-1]: reason for path, reason in report.skipped}
    assert reasons["empty.md"] == "empty file"
    assert reasons["latin.txt"] == "not UTF-8 text"
    assert "damaged" in reasons["broken.png"]
    assert "damaged" in reasons["broken.pdf"]
    assert "Word" in reasons["broken.docx"]
    assert "no text" in reasons["blank.html"]
    assert not {"line\nbreak.md", "p1.md", "loop.md", "out.md"} & set(reasons)
    assert report.files["new"] >= 2
    assert found(index, "name newline")
    again = index.update()
    assert len(again.skipped) == len(report.skipped)


def test_a_picture_bomb(folder):
    data = bytearray(Image.new("1", (8, 8))._repr_png_())
    data[16:24] = (30_000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    (folder / "bomb.png").write_bytes(data)
    with pytest.raises(ValueError, match="more pixels than is safe"):
        read_file(folder / "bomb.png", folder)


def test_walk_is_in_order_and_follows_no_loops(folder):
    pages(folder, [2, 1])
    write(folder / "sub" / "x.md", "x")
    (folder / "sub" / "up").symlink_to(folder)
    names = [path.name for path in walk(folder)]
    assert names == ["p1.md", "p2.md", "x.md"]
    assert Counter(names).most_common(1)[0][1] == 1
