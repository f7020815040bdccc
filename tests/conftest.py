import sys
from functools import cache

import pytest
import torch
from tiny import picture, tiny

from mpic_rag import Document, Engine, Store, cli
from mpic_rag.cache import LinkedCache
from mpic_rag.indexing.collection import FILE

FAMILIES = ("llama", "llava", "qwen2_5_vl")
family = cache(tiny)  # weights are never changed, so one of each serves all tests


@pytest.fixture(params=FAMILIES)
def model(request):
    return family(request.param)


@pytest.fixture
def text_model():
    return family("llama")


@pytest.fixture
def vision_model():
    return family("qwen2_5_vl")


@pytest.fixture(autouse=True)
def poisoned_caches(monkeypatch):
    """New cache slots hold NaN: whoever reads one that nobody wrote will notice."""
    allocate = LinkedCache.allocate.__func__

    def poisoned(cls, *args):
        cache = allocate(cls, *args)
        cache._keys.fill_(torch.nan)
        cache._values.fill_(torch.nan)
        return cache

    monkeypatch.setattr(LinkedCache, "allocate", classmethod(poisoned))


@pytest.fixture
def make_engine(tmp_path):
    """Engines on one folder, which load whatever is stored, whichever way is quicker."""

    def make(model, store={}, **kwargs):  # noqa: B006
        return Engine(model, Store(tmp_path / "store", adaptive=False, **store), **kwargs)

    return make


@pytest.fixture
def shelf(model):
    """Split texts, pictures first, last and alone, in two sizes, one-token chunks."""
    if model.family.markers is None:
        small, large = "a small red box", "a tall blue box, twice as high"
    else:
        small, large = picture((56, 28), "red"), picture((56, 84), "blue")
    return [
        Document.of("amber", [["amber station. its sign:"], [small], ["its keeper is maria."]]),
        Document.of("cliff", [[large, "the bars of cliff"], ["see", small, large], ["x"]]),
        Document.of("lone", [["a lone text, 1904."]]),
        Document.of("twin", [[small], [large]]),
    ]


@pytest.fixture
def open_store(tmp_path):
    """Opens the same store again, as another process would."""
    return lambda **options: Store(tmp_path / "store", **options)


@pytest.fixture
def store(open_store):
    return open_store()


@pytest.fixture
def library(store):
    return store.dynamic


@pytest.fixture
def mpic_rag(tmp_path, monkeypatch, capfd):
    """Run a command in an empty folder; returns exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(command, *arguments):
        own = any((tmp_path / str(argument) / FILE).exists() for argument in arguments)
        users = command in ("ask", "compile", "demo") and not own  # would be the user's own store
        store = ["--store", tmp_path / "store"] if users else []
        monkeypatch.setattr(sys, "argv", ["mpic-rag", *map(str, [command, *store, *arguments])])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return end.value.code or 0, out, err

    return run
