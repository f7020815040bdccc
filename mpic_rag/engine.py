"""Chunks in the store, and conversations that answer from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any

import torch

from mpic_rag import selftest
from mpic_rag.cache import LinkedCache
from mpic_rag.compiler import Compiler, Mode, compute
from mpic_rag.conversation import Answer, Conversation, Turn
from mpic_rag.documents import Chunk, Content, Document
from mpic_rag.model import Model
from mpic_rag.report import Report
from mpic_rag.segment import Segment
from mpic_rag.selection import Selector
from mpic_rag.store import Candidate, Entry, Found, Held, Library, Store, Stored, StoreError
from mpic_rag.store.costs import TELLING


class Engine:
    """Answers from precompiled chunks; one engine serves any number of conversations.

    With an `owner` it compiles into that owner's static library and looks there first; without
    one it knows the dynamic library only.
    """

    def __init__(
        self,
        model: Model,
        store: Store,
        *,
        mode: Mode = "document",
        selector: str = "none",
        warmup: Sequence[Chunk] = (),
        owner: str | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self.libraries = [*([store.static(owner)] if owner else []), store.dynamic]
        self.fault = selftest.fault(model)
        self.selector = selector
        Selector.parse(selector)
        self.compiler = Compiler(model, mode, warmup, store.int8)
        self._prefixes: dict[str | None, tuple[LinkedCache, int]] = {}
        self._background = ThreadPoolExecutor(1, "compile")
        self._pending: dict[str, Future[None]] = {}
        self._pending_lock = threading.Lock()

    def compile(
        self, documents: Iterable[Document], progress: Callable[[Document, int], None] | None = None
    ) -> int:
        """Compile what the store lacks; returns how many chunks that was. Safe to interrupt."""
        total = 0
        for document in documents:
            with self.model.lock:
                new = self.compiler.put_document(document, self.libraries[0])
            total += new
            if progress:
                progress(document, new)
        self.store.costs.save()
        return total

    def conversation(
        self, system: str | Content | None = None, turns: Sequence[Turn] = ()
    ) -> Conversation:
        """Start a conversation, or go on from earlier `turns`.

        `system` replaces the template's own system prompt.
        """
        return Conversation(self, system, turns)

    def ask(self, question: str | Content, chunks: Sequence[Chunk] = (), **kwargs: Any) -> Answer:
        """Answer one question; takes what `Conversation.stream` takes."""
        return self.conversation().ask(question, chunks, **kwargs)

    def score(
        self,
        question: str | Content,
        chunks: Sequence[Chunk],
        answer: Sequence[int],
        selector: str | None = None,
    ) -> tuple[torch.Tensor, Report]:
        """Log-probabilities of a given answer's tokens; as `Conversation.score`."""
        return self.conversation().score(question, chunks, answer, selector)

    def drain(self) -> None:
        """Wait until chunks that were missing are stored; raises what went wrong there."""
        self.store.drain()  # what a look at the remote did not find is compiled
        with self._pending_lock:
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.result()
        self.store.drain()  # what was compiled is uploaded

    @property
    def identity(self) -> str:
        """The model and where it runs, as costs name it."""
        return self.compiler.cost_name

    @property
    def room(self) -> int:
        """Tokens of a document that can be compiled in one pass."""
        opening = len(self.compiler.prefix) + sum(
            self.model.count(part) + 1 for chunk in self.compiler.warmup for part in chunk.parts
        )
        return self.model.max_tokens - opening

    @property
    def bytes_per_token(self) -> int:
        """About what a stored token takes."""
        numbers = 2 * self.model.layers * self.model.kv_heads * self.model.head_dim
        return numbers * (1 if self.store.int8 else self.model.dtype.itemsize)

    def candidates(self, chunk: Chunk) -> list[Candidate]:
        """The entries that may serve a chunk, best first.

        Its document's context before isolation; the owner's own library before the shared one.
        """
        own = [(self.compiler.mode_in(library), library) for library in self.libraries]
        alone = [(mode, lib) for mode, lib in own if mode == "document" and chunk.context]
        modes: list[tuple[Mode, Library]] = [*own, *(("isolated", library) for _, library in alone)]
        return [Candidate(m, lib, self.compiler.key(chunk, lib, m)) for m, lib in modes]

    def start(self, system: str | None) -> tuple[LinkedCache, int]:
        """The prompt's opening, an exact prefix, computed once for each system prompt."""
        if system not in self._prefixes:
            ids = self.model.codec.template(system).prefix
            if len(self._prefixes) > 16:
                self._prefixes.clear()
            self._prefixes[system] = compute(
                self.model, [self.model.text_segment(ids)] if ids else []
            )
        return self._prefixes[system]

    def compile_later(self, chunks: Sequence[Chunk]) -> None:
        """Compile chunks in isolation in the background: their documents aren't at hand."""
        library = self.libraries[0]
        mode: Mode = "bare" if self.compiler.mode == "bare" else "isolated"
        since = library.mark()

        def work(chunk: Chunk) -> None:
            with self.model.lock:
                kv = self.compiler.compile([chunk])[0]
            try:
                self.compiler.put(chunk, library, kv, since, mode)
            except OSError as error:
                library.fault(self.compiler.key(chunk, library, mode), error)

        with self._pending_lock:
            done = [k for k, f in self._pending.items() if f.done() and not f.exception()]
            for key in done:
                del self._pending[key]
            for chunk in chunks:
                key = self.compiler.key(chunk, library, mode)
                if key not in self._pending:
                    self._pending[key] = self._background.submit(work, chunk)

    def measure_later(self, loaded: Sequence[Segment]) -> None:
        """Compute a loaded chunk in the background, to know from then on which is quicker."""
        chosen = max(loaded, key=len, default=None)
        if chosen is None or len(chosen) < TELLING:
            return

        def work() -> None:
            with self.model.lock:
                began = perf_counter()
                compute(self.model, [chosen])
                seconds = perf_counter() - began
            work = self.model.work(torch.arange(len(chosen)))
            self.store.costs.measure_prefill(self.identity, work, seconds)

        self.store.later(work)

    def look_again(self, chunk: Chunk, found: Found | None) -> None:
        """Load, in the background, an entry that seemed slow to load: it may be no longer."""
        if found is None:
            self.store.later(partial(self._fetch, chunk))
        elif not isinstance(found.entry, Held):
            self.store.later(partial(self._load, found, found.candidate.library.mark()))

    def _fetch(self, chunk: Chunk) -> None:
        if not any(c.library.fetch(c.key) for c in self.candidates(chunk)):
            self.compile_later([chunk])

    def _load(self, found: Found, since: int) -> None:
        library, key, entry = found.candidate.library, found.candidate.key, found.entry
        try:
            began = perf_counter()
            if isinstance(entry, Stored):
                entry = library.disk.open(entry)
            assert isinstance(entry, Entry)
            kv = entry.kv(features=True)
        except (StoreError, OSError) as error:
            library.fault(key, error, found.tier)
            return
        self.store.costs.measure_load(entry.tier, entry.bytes_read, perf_counter() - began)
        library.keep(key, entry, kv, since)
