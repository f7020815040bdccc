"""An index: files in, passages with their caches out, and answers from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpic_rag.compiler import Mode
from mpic_rag.conversation import Stream
from mpic_rag.documents import Part, Picture
from mpic_rag.engine import Engine
from mpic_rag.indexing.build import Options, Progress, Report, compile_missing, read
from mpic_rag.indexing.collection import Collection
from mpic_rag.model import BUNDLED, Model
from mpic_rag.retrievers.embedders import BUNDLED_CLIP, ClipEmbedder, SentenceEmbedder
from mpic_rag.retrievers.probes import calibrate
from mpic_rag.retrievers.search import Found, Search
from mpic_rag.store import Store

if TYPE_CHECKING:
    from mpic_rag.chat_engine import LinkedChatEngine
    from mpic_rag.llm import LinkedLLM
    from mpic_rag.query_engine import LinkedQueryEngine
    from mpic_rag.retrievers.llama_index import IndexRetriever

NONE = "none"  # in place of an embedder's name


DEFAULTS = {"model": str(BUNDLED), "text": NONE, "pictures": str(BUNDLED_CLIP), "store": ""}


def settings(folder: str | Path) -> dict[str, Any]:
    """What an index was made with: model, embedders, paths, and where its caches lie."""
    collection = Collection(folder)
    known = {**DEFAULTS, **(collection.fact("settings") or {})}
    collection.close()
    return {**known, "store": known["store"] or str(Path(folder) / "caches")}


def _quiet(what: str, done: int, total: int) -> None:
    pass


class Index:
    """A folder that `build` made; it remembers its files, its model, retrievers and store.

    `store` is the folder of its caches, by default inside; `engine` replaces model and store.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: str | Path | None = None,
        store: Store | str | Path | None = None,
        engine: Engine | None = None,
        mode: Mode = "document",
        create: bool = False,
        text: str | None = None,
        pictures: str | None = None,
    ) -> None:
        self.collection = Collection(folder, create)
        known = self.collection.fact("settings") or {}
        place = Path(store).absolute() if isinstance(store, str | Path) else None
        asked = {"model": model, "text": text, "pictures": pictures, "store": place}
        self.settings: dict[str, Any] = {
            **DEFAULTS,
            **known,
            **{name: str(value) for name, value in asked.items() if value is not None},
        }
        if engine is None:
            place = self.settings["store"] or Path(folder) / "caches"
            kept = store if isinstance(store, Store) else Store(place)
            engine = Engine(Model.load(self.settings["model"]), kept, mode=mode)
        self.engine = engine
        sentences, clip = self.settings["text"], self.settings["pictures"]
        self.search = Search(
            self.collection,
            None if sentences == NONE else SentenceEmbedder(sentences),
            None if clip == NONE else ClipEmbedder(clip),
        )

    @classmethod
    def build(
        cls,
        paths: str | Path | Sequence[str | Path],
        folder: str | Path,
        *,
        options: Options | None = None,
        progress: Progress = _quiet,
        compile: bool = True,
        **kwargs: Any,
    ) -> Index:
        """Index files and folders, or bring an index up to date; `kwargs` as for `Index`."""
        index = cls(folder, create=True, **kwargs)
        given = [paths] if isinstance(paths, str | Path) else paths
        index.update([Path(p) for p in given], options, progress, compile)
        return index

    def update(
        self,
        paths: Sequence[Path] = (),
        options: Options | None = None,
        progress: Progress = _quiet,
        compile: bool = True,
    ) -> Report:
        """Add `paths` to what is indexed, and read, embed and compile what changed there.

        Safe to interrupt: the next call goes on. Raises `ValueError` where a path is gone.
        """
        roots = [Path(p) for p in self.settings.get("roots", [])]
        for path in (Path(p).absolute() for p in paths):
            if not path.exists():
                raise ValueError(f"there is no file or folder {path}")
            roots += [path] if path not in roots else []
        if not roots and not self.collection.documents():
            raise ValueError("nothing to index: name a file or a folder")
        for root in roots:
            if not root.exists():
                raise ValueError(f"{root} is gone: bring it back, or drop it with --forget {root}")
        chosen = options or Options(**self.settings.get("options", {}))
        chosen = replace(chosen, pictures=self.engine.model.family.markers is not None)
        self.settings |= {"roots": list(map(str, roots)), "options": chosen.__dict__}
        self.collection.set_fact("settings", self.settings)
        report = read(self.collection, roots, chosen, self.engine, progress)
        self.search.update(progress)
        if self.collection.fact("weighed") != self.collection.revision:
            calibrate(self.search)
            self.collection.set_fact("weighed", self.collection.revision)
        if compile:
            self.compile(report, progress)
        return report

    def forget(self, path: str | Path) -> None:
        """No longer index a path; `update` then drops what came from there."""
        gone = str(Path(path).absolute())
        if gone not in self.settings.get("roots", []):
            raise ValueError(f"{gone} is not among {', '.join(self.settings.get('roots', []))}")
        self.settings["roots"].remove(gone)
        self.collection.set_fact("settings", self.settings)

    def compile(self, report: Report | None = None, progress: Progress = _quiet) -> Report:
        """Compile what the store lacks."""
        report = report or Report()
        compile_missing(self.collection, self.engine, report, progress)
        return report

    def retrieve(
        self,
        question: str = "",
        picture: Picture | None = None,
        count: int = 8,
        around: int = 0,
    ) -> list[Found]:
        """The best passages for a question, a picture, or both, with so many around each."""
        return self.search.search(question, picture, count, around=around)

    def ask(
        self,
        question: str,
        pictures: Sequence[Picture] = (),
        count: int = 8,
        around: int = 1,
        system: str | None = None,
        **kwargs: Any,
    ) -> tuple[Stream, list[Found]]:
        """Answer from the best passages and those `around`: a stream of text, and its sources.

        Sources that the context has no room for are left out. `kwargs` go to
        `Conversation.stream`.
        """
        began = perf_counter()
        parts: list[Part] = [*pictures, question]
        model = self.engine.model
        room = model.max_tokens - kwargs.get("max_tokens", 256)
        template = model.codec.template(system)
        room -= sum(map(model.count, parts)) + len(template.prefix) + len(template.suffix)
        chunks, shown = [], []
        for found in self.retrieve(question, next(iter(pictures), None), count, around):
            try:
                mine = self.collection.chunks(found.row)
            except FileNotFoundError:  # an update dropped it meanwhile
                continue
            tokens = sum(model.count(chunk.parts[0]) + 1 for chunk in mine)
            if tokens <= room:
                room -= tokens
                chunks += mine
                shown.append(found)
        stream = self.engine.conversation(system).stream(parts, chunks, **kwargs)
        stream.report.retrieve_s = perf_counter() - began
        return stream, shown

    def llm(self, **kwargs: Any) -> LinkedLLM:
        """A LlamaIndex LLM that knows all passages of this index by their bytes."""
        from mpic_rag.catalog import Catalog
        from mpic_rag.llm import LinkedLLM

        catalog = Catalog()
        for document in self.collection.documents():
            for chunk in self.collection.load(document):
                catalog.learn(chunk)
        return LinkedLLM(self.engine, catalog, model_name=self.settings["model"], **kwargs)

    def retriever(self, similarity_top_k: int = 8, around: int = 0) -> IndexRetriever:
        """A LlamaIndex retriever."""
        from mpic_rag.retrievers.llama_index import IndexRetriever

        return IndexRetriever(self.search, similarity_top_k, around)

    def query_engine(
        self, similarity_top_k: int = 8, around: int = 1, **kwargs: Any
    ) -> LinkedQueryEngine:
        """A LlamaIndex query engine; `kwargs` go to `LinkedSynthesizer`."""
        from mpic_rag.llm import LinkedLLM
        from mpic_rag.query_engine import LinkedQueryEngine

        llm = kwargs.pop("llm", None) or LinkedLLM(self.engine)
        return LinkedQueryEngine.from_args(self.retriever(similarity_top_k, around), llm, **kwargs)

    def chat_engine(
        self, similarity_top_k: int = 4, around: int = 1, **kwargs: Any
    ) -> LinkedChatEngine:
        """A LlamaIndex chat engine; `kwargs` go to `LinkedSynthesizer`."""
        from mpic_rag.chat_engine import LinkedChatEngine
        from mpic_rag.llm import LinkedLLM

        llm = kwargs.pop("llm", None) or LinkedLLM(self.engine)
        return LinkedChatEngine.from_args(self.retriever(similarity_top_k, around), llm, **kwargs)

    def close(self) -> None:
        """Finish what was begun."""
        self.engine.store.close()
        self.collection.close()
