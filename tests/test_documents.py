"""Documents from files, friendly and hostile."""

import io
import struct
import zlib

import pytest
from PIL import Image
from tiny import picture

from mpic_rag import Chunk, Document, Picture, read_folder
from mpic_rag.documents import orphans


def test_markdown_paragraphs_are_chunks(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(picture((40, 40), "red").data)
    path = tmp_path / "amber.md"
    path.write_text("the sign:\n![alt text](images/a.png)\n\n\nits keeper\nis maria.\n")
    document = Document.read(path)
    first, second = document.chunks
    assert first.parts[0] == "the sign:"
    assert isinstance(first.parts[1], Picture)
    assert second.parts == ("its keeper\nis maria.",)
    assert (first.context, second.context != "") == ("", True)
    assert read_folder(tmp_path) == [document]


def test_context_covers_everything_before():
    def context(*texts):
        return Document.of("d", [[t] for t in texts]).chunks[-1].context

    assert context("a", "x") == context("a", "y")
    assert len({context("a", "x"), context("b", "x"), context("a", "b", "x"), context("x")}) == 4
    assert context("ab", "c", "x") != context("a", "bc", "x")


def test_digest_tells_parts_apart():
    red = picture((8, 8), "red")
    digests = [
        Chunk.of("ab", "c").digest,
        Chunk.of("a", "bc").digest,
        Chunk.of("abc").digest,
        Chunk.of("abc", red).digest,
        Chunk.of(red, "abc").digest,
        Chunk.of(picture((8, 8), "blue"), "abc").digest,
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("target", ["../secret.png", "/etc/passwd", "images/../../secret.png"])
def test_pictures_stay_in_the_folder(tmp_path, target):
    (tmp_path / "secret.png").write_bytes(picture((8, 8), "red").data)
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.md").write_text(f"![x]({target})")
    with pytest.raises(ValueError, match="outside"):
        Document.read(folder / "a.md")


def test_a_link_that_leaves_the_folder(tmp_path):
    (tmp_path / "secret.png").write_bytes(picture((8, 8), "red").data)
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "inside.png").symlink_to(tmp_path / "secret.png")
    (folder / "a.md").write_text("![x](inside.png)")
    with pytest.raises(ValueError, match="outside"):
        Document.read(folder / "a.md")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.md", b"", "empty"),
        ("a.md", b"\xff\xfe\x00", "neither a picture nor"),
        ("a.md", b"![x](none.png)", "can't read"),
        ("a.png", b"\x89PNG\r\n\x1a\nrubbish", "can be read"),
        ("a.jpg", b"no picture", "can be read"),
        ("a.mp4", b"", "video or audio"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Document.read(tmp_path / name)


def test_a_picture_cut_short():
    whole = picture((200, 200), "red").data
    for length in range(8, len(whole), 40):
        with pytest.raises(ValueError, match="picture"):
            Picture(whole[:length]).decode()


def test_a_decompression_bomb():
    side = 60_000
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunk = b"IHDR" + header
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    data += struct.pack(">I", zlib.crc32(chunk)) + struct.pack(">I", 0) + b"IEND"
    with pytest.raises(ValueError, match="scale it down"):
        Picture(data).decode()


def test_pictures_are_upright_rgb():
    image = Image.new("P", (20, 10))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", exif=exif)
    decoded = Picture(buffer.getvalue()).decode()
    assert (decoded.mode, decoded.size) == ("RGB", (10, 20))


def test_no_format_that_runs_another_program():
    with pytest.raises(ValueError, match="can be read"):
        Picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n").decode()


def test_folders_are_read_without_what_leads_out_or_is_hidden(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    folder = tmp_path / "docs"
    (folder / ".git").mkdir(parents=True)
    (folder / "dir.md").mkdir()
    (folder / ".git" / "a.md").write_text("hidden")
    (folder / "out.md").symlink_to(tmp_path / "secret.txt")
    (folder / "a.md").write_text("shown ![badge](https://example.org/a.png)")
    (document,) = read_folder(folder)
    assert document.name == "a"
    assert isinstance(document.chunks[0].parts[0], str)


def test_a_document_checks_its_contexts():
    with pytest.raises(ValueError, match="out of its context"):
        Document("page", (Chunk.of("a"), Chunk.of("b")))
    with pytest.raises(ValueError, match="empty"):
        Document("page", ())


def test_missing_and_empty_folders(tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no"):
        read_folder(tmp_path)


def test_orphans_are_those_without_what_stands_before_them():
    one, two, three = Document.of("amber", [["a"], ["b"], ["c"]]).chunks
    other = Document.of("cliff", [["a"], ["x"]]).chunks
    assert orphans([one, two, three]) == set()
    assert orphans([three]) == {0}
    assert orphans([two, one, three]) == {0}
    assert orphans([three, two]) == {0, 1}
    assert orphans([one, other[1]]) == set()  # equal beginnings are one and the same
    assert orphans([Chunk.of("lone")]) == set()
