"""Known chunks are found in joined prompts, byte for byte, and nothing else is."""

import random

import pytest
from tiny import picture

from mpic_rag import Chunk, Document
from mpic_rag.catalog import WHOLE, Catalog

LONG = "The harbour of Amber has three piers, and ships call on Mondays."
OTHER = "The harbour of Cliff has one pier, where the mail boat lands."


def chunks(found):
    return [item for item in found if isinstance(item, Chunk)]


def test_joined_texts_are_taken_apart():
    page = Document.of("page", [[LONG], [OTHER]])
    catalog = Catalog([page])
    for glue in ("\n\n", " ", "\n---\n "):
        found = catalog.find([f"Context:\n{LONG}{glue}{OTHER}\n\nQuery: why?"])
        assert chunks(found) == list(page.chunks)
        assert found[0] == "Context:\n"
        assert found[-1] == "Query: why?"


@pytest.mark.parametrize("text", [LONG[:-1], LONG[1:], "x" + LONG, LONG + "x", LONG.lower()])
def test_what_differs_is_not_found(text):
    assert not chunks(Catalog([Document.of("page", [[LONG]])]).find([f"see {text} now"]))


def test_a_short_text_must_stand_apart():
    catalog = Catalog([Document.of("page", [["see below"], [LONG]])])
    for text in (
        "see below",
        "as said:\nsee below\n\nmore",
        f"{LONG} see below",
        f"see below {LONG}",
    ):
        assert "see below" in [c.parts[0] for c in chunks(catalog.find([text]))]
    for text in ("now see below for more", "see below for more", "now see below"):
        assert not chunks(catalog.find([text]))


def test_the_longest_text_wins():
    whole = f"{LONG} {OTHER}"
    catalog = Catalog([Document.of("a", [[LONG]]), Document.of("b", [[whole]])])
    (found,) = catalog.find([whole])
    assert found.document == "b"


def test_the_document_that_the_prompt_comes_from():
    first = Document.of("first", [["Amber."], [LONG]])
    second = Document.of("second", [[OTHER], [LONG]])
    catalog = Catalog([first, second])
    assert chunks(catalog.find([f"{OTHER} {LONG}"]))[1] == second.chunks[1]
    assert chunks(catalog.find(["Amber.", LONG]))[1] == first.chunks[1]
    assert chunks(catalog.find([LONG])) == [first.chunks[1]]
    assert chunks(catalog.find([LONG], [second.chunks[1].context])) == [second.chunks[1]]


def test_pictures_are_found_by_their_bytes():
    red, blue = picture((56, 28), "red"), picture((56, 28), "blue")
    page = Document.of("page", [["The sign:"], [red]])
    found = Catalog([page]).find(["The sign:", red, blue])
    assert found == [*page.chunks, blue]


def test_random_joins_give_all_chunks_back():
    draw = random.Random(5)
    letters = "ab c\n"
    for _ in range(200):
        texts = {
            "".join(draw.choices(letters, k=draw.randint(WHOLE, 90))).strip() for _ in range(4)
        }
        texts = [t for t in texts if len(t) >= WHOLE]
        pages = [Document.of(f"d{n}", [[t]]) for n, t in enumerate(texts)]
        order = draw.choices(texts, k=6)
        found = Catalog(pages).find([draw.choice([" ", "\n\n"]).join(order)])
        assert [c.parts[0] for c in chunks(found)] == order
