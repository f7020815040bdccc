"""Chunks in the store, and conversations that answer from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mpic_rag.cache import LinkedCache
from mpic_rag.compiler import Compiler, Mode, compute, get, put
from mpic_rag.conversation import Answer, Conversation
from mpic_rag.documents import Chunk, Document, Part
from mpic_rag.linker import Piece
from mpic_rag.model import Model
from mpic_rag.selection import Selector
from mpic_rag.store import Store, StoreError


class Engine:
    """Answers from precompiled chunks; one engine serves any number of conversations."""

    def __init__(
        self,
        model: Model,
        store: Store,
        *,
        mode: Mode = "document",
        selector: str = "none",
        warmup: Sequence[Chunk] = (),
    ) -> None:
        self.model = model
        self.store = store
        self.selector = selector
        Selector.parse(selector)
        self.compiler = Compiler(model, mode, warmup)
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
                new = self.compiler.put_document(document, self.store)
            total += new
            if progress:
                progress(document, new)
        return total

    def conversation(self, system: str | None = None) -> Conversation:
        """Start a conversation; `system` replaces the template's own system prompt."""
        return Conversation(self, system)

    def ask(
        self, question: str | Sequence[Part], chunks: Sequence[Chunk] = (), **kwargs: Any
    ) -> Answer:
        """Answer one question; takes what `Conversation.stream` takes."""
        return self.conversation().ask(question, chunks, **kwargs)

    def drain(self) -> None:
        """Wait until chunks that were missing are stored; raises what went wrong there."""
        with self._pending_lock:
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.result()

    def keys(self, chunk: Chunk) -> list[tuple[Mode, str]]:
        """The entries that may serve a chunk, best first: its document's, then an isolated one."""
        modes: list[Mode] = [self.compiler.mode]
        if self.compiler.mode == "document" and chunk.context:
            modes.append("isolated")
        return [(mode, self.compiler.key(chunk, mode)) for mode in modes]

    def load(
        self, keys: Sequence[tuple[Mode, str]], reads: Sequence[str]
    ) -> tuple[Piece | None, str, int]:
        """Read the first sound entry: its piece, its mode and its bytes, or None and the reason."""
        reason = "not compiled"
        for mode, key in keys:
            try:
                segment, kv, size = get(self.store, key, reads)
            except KeyError:
                continue
            except StoreError as error:
                reason = str(error)
                self.store.delete(key)  # so that compiling again makes it anew
                continue
            except OSError as error:
                reason = f"unreachable: {error.strerror}"
                continue
            return Piece(segment, kv), mode, size
        return None, reason, 0

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

        def work(chunk: Chunk, key: str) -> None:
            with self.model.lock:
                kv = self.compiler.compile([chunk])[0]
            put(self.store, key, kv)

        with self._pending_lock:
            done = [k for k, f in self._pending.items() if f.done() and not f.exception()]
            for key in done:
                del self._pending[key]
            for chunk in chunks:
                key = self.compiler.key(chunk, "isolated")
                if key not in self._pending:
                    self._pending[key] = self._background.submit(work, chunk, key)
