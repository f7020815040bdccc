"""An indexer that is killed at any instant goes on where it was, and index and store agree."""

import multiprocessing
import random
import time

import pytest
from test_indexing import keys, pages, wanted

SERVER = multiprocessing.get_context("forkserver")


def build(folder, documents, ready):
    from tiny import tiny

    from mpic_rag import Engine, Store
    from mpic_rag.index import Index

    engine = Engine(tiny("llama"), Store(folder / "caches", memory=0))
    index = Index(folder, engine=engine, create=True, pictures="none")
    ready.set()
    index.update([documents])
    index.close()


def kill_indexers(tmp_path, text_model, rounds):
    from mpic_rag import Engine, Store
    from mpic_rag.index import Index

    draw = random.Random(1)
    SERVER.set_forkserver_preload([__name__, "mpic_rag.index", "tiny"])
    documents, folder = tmp_path / "docs", tmp_path / "index"
    for round_ in range(rounds):
        # New files, changed ones, and some that go.
        pages(documents, range(round_ * 10, round_ * 10 + 15))
        for path in draw.sample(sorted(documents.iterdir()), 3):
            path.unlink()
        for path in draw.sample(sorted(documents.iterdir()), 3):
            path.write_text(path.read_text() + f"\n\nchanged {round_}\n")
        ready = SERVER.Event()
        indexer = SERVER.Process(target=build, args=(folder, documents, ready))
        indexer.start()
        assert ready.wait(120)
        time.sleep(draw.random() * 0.8)
        indexer.kill()
        indexer.join()
    store = Store(folder / "caches", memory=0)
    index = Index(folder, engine=Engine(text_model, store), pictures="none")
    report = index.update()
    assert not report.skipped
    assert not report.uncompiled
    assert keys(index) == wanted(index)
    assert report.documents == len({p.read_text() for p in documents.iterdir()})
    store.dynamic.check()
    assert store.dynamic.check() == []
    for path in draw.sample(sorted(documents.iterdir()), 5):
        name = path.stem[1:]
        first = index.retrieve(f"station {name} goods{name}")[0]
        assert f"goods{name}" in first.row.text
    again = index.update()
    assert (again.compiled, again.deleted) == (0, 0)
    index.close()


def test_killed_indexers(tmp_path, text_model):
    kill_indexers(tmp_path, text_model, 4)


@pytest.mark.slow
def test_many_killed_indexers(tmp_path, text_model):
    kill_indexers(tmp_path, text_model, 30)
