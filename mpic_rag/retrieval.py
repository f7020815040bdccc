"""The chunks of one request: which entry serves each, what is loaded and what is computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mpic_rag.documents import Chunk, orphans
from mpic_rag.linker import Piece
from mpic_rag.loading import SMALL, LoadError, Loading, measure, start
from mpic_rag.report import ChunkReport, Report
from mpic_rag.segment import ChunkKV
from mpic_rag.selection import Selector
from mpic_rag.store import Candidate, Entry, Found, Held, Stored, StoreError
from mpic_rag.store.costs import Load
from mpic_rag.store.remote import RemoteError

if TYPE_CHECKING:
    from mpic_rag.engine import Engine

PATIENCE = 4.0  # times what loading or computing should take, until a remote is given up
TELLING = 1 << 16  # bytes whose time says something about a disk
CHEAPER = "quicker to compute"


class Retrieval:
    """Call `find`, `load`, `render`, then `pieces` are complete; `settle` when all is done."""

    def __init__(self, engine: Engine, chunks: Sequence[Chunk], rule: Selector) -> None:
        self.engine, self.store = engine, engine.store
        self.chunks, self.rule = chunks, rule
        self.found: list[Found | None] = [None] * len(chunks)
        self.misses = ["not compiled" if rule.reads else "not asked for"] * len(chunks)
        self.pieces: list[Piece | None] = [None] * len(chunks)
        self.loadings: list[Loading] = []
        self._opened: list[Entry] = []
        # Computed here, these would not know what their documents said before them.
        self._orphans = orphans(chunks) if engine.compiler.mode == "document" else set()
        self._uncertain = False
        self._compute_s = 0.0  # of what may be loaded
        self._marks: dict[str, int] = {}
        self._read: list[tuple[Candidate, Entry, ChunkKV, int]] = []

    def find(self) -> None:
        """Look every chunk up."""
        if not self.rule.reads or not self.chunks:
            return
        candidates = [self.engine.candidates(chunk) for chunk in self.chunks]
        for library in {c.library for some in candidates for c in some}:
            self._marks[library.name] = library.mark()
        far = self._worth_asking()
        self.found = self.store.find(candidates, far)
        for i, found in enumerate(self.found):
            if found is None and not far:
                self.misses[i] = CHEAPER
            elif found is None:
                known = [self.store.faults.latest.get(c.key) for c in candidates[i]]
                self.misses[i] = next((reason for reason in known if reason), "not compiled")

    def _worth_asking(self) -> bool:
        """Whether to ask the remote at all; its answer is waited for."""
        engine = self.engine
        adaptive = self.store.adaptive and self.rule.reuses
        if not self.store.remote or not adaptive or self._orphans:
            return True
        tokens = int(self.store.costs.chunk_tokens * len(self.chunks))
        work = engine.model.work(torch.arange(tokens))
        size = tokens * engine.bytes_per_token
        return self.store.costs.worth_asking(
            "remote", engine.identity, len(self.chunks), size, work
        )

    def load(self) -> None:
        """Read small entries, begin to read large ones, pass over what is quicker to compute."""
        costs = self.store.costs
        hits = [(i, found) for i, found in enumerate(self.found) if found]
        passed: set[int] = set()
        loads, missing = self._work() if self.rule.reuses else ([], 0.0)
        rate = costs.token_s.get(self.engine.identity, 0.0)
        self._compute_s = rate * sum(load.work for load in loads)
        if self.rule.reuses and self.store.adaptive:
            far = [(i, found) for i, found in hits if found.size]
            chosen = costs.to_compute(self.engine.identity, loads, missing)
            passed = {far[n][0] for n in chosen}
            self._uncertain = costs.uncertain(self.engine.identity, loads)
        began = time.perf_counter()
        for i, found in hits:
            if i in passed:
                self.misses[i] = CHEAPER
                continue
            try:
                knows_more = i in self._orphans and found.candidate.mode == "document"
                self.pieces[i] = replace(self._piece(found), knows_more=knows_more)
            except (StoreError, OSError) as error:
                self._fail(i, error)
        read = sum(entry.bytes_read for entry in self._opened if entry.tier == "disk")
        if read > TELLING and not self.loadings:
            costs.measure_load("disk", read, time.perf_counter() - began)
        start(self.loadings)

    def _work(self) -> tuple[list[Load], float]:
        """What entries out of memory cost to load or compute, and what missing chunks cost."""
        engine, loads, missing, slot = self.engine, [], 0.0, 0
        for i, found in enumerate(self.found):
            usual = int(self.store.costs.chunk_tokens)
            tokens = found.tokens(engine.bytes_per_token) if found else usual
            work = engine.model.work(torch.arange(slot, slot + tokens))
            if found is None:
                missing += work
            elif found.size:
                needed = i in self._orphans and found.candidate.mode == "document"
                loads.append(Load(found.tier, found.size, work, found.size > SMALL, needed))
            slot += tokens
        return loads, missing

    def _piece(self, found: Found) -> Piece:
        features = "features" in self.rule.reads
        entry, candidate = found.entry, found.candidate
        if isinstance(entry, Held):
            return Piece(entry.kv.segment, entry.kv if self.rule.reuses else None)
        if isinstance(entry, Stored):
            entry = candidate.library.disk.open(entry)
        self._opened.append(entry)
        if not self.rule.reuses:
            return Piece(entry.segment(features))
        since = self._marks[candidate.library.name]
        if entry.size <= SMALL:
            # Memory wants the features too: the next request may need them.
            kv = entry.kv(features=True)
            self._read.append((candidate, entry, kv, since))
            return Piece(kv.segment, kv)
        segment = entry.segment(features=True)
        loading = Loading(found, entry, segment, self._deadline(entry), since)
        self.loadings.append(loading)
        return Piece(loading.segment, layer=loading.layer)

    def _deadline(self, entry: Entry) -> float:
        """When to give a remote entry up; a disk that is slow is waited for, and measured."""
        if entry.tier == "disk" or not self.store.remote:
            return float("inf")
        expected = self.store.costs.load_s(entry.tier, entry.kv_bytes * len(self.found))
        timeout = self.store.remote.timeout
        # As long as it isn't known what computing takes, a slow remote gets its chance.
        instead = self._compute_s or timeout
        return time.monotonic() + max(timeout, PATIENCE * max(expected, instead))

    def render(self) -> None:
        """Lay out the chunks that no entry serves, pictures through the vision tower."""
        missing = [i for i, piece in enumerate(self.pieces) if piece is None]
        segments = self.engine.model.segments([self.chunks[i].parts for i in missing])
        for i, segment in zip(missing, segments, strict=True):
            self.pieces[i] = Piece(segment)

    def lose(self, error: LoadError) -> None:
        """A load failed while the model ran: that chunk is computed instead, the others stay."""
        index = next(
            i for i, piece in enumerate(self.pieces) if piece and piece.layer == error.loading.layer
        )
        error.loading.abandon()
        self.loadings.remove(error.loading)
        self.pieces[index] = None
        self._fail(index, error.error)

    def _fail(self, index: int, error: Exception) -> None:
        found = self.found[index]
        assert found is not None
        known = error if isinstance(error, StoreError | OSError) else StoreError(repr(error))
        found.candidate.library.fault(found.candidate.key, known, found.tier)
        if self.store.remote and isinstance(known, RemoteError):
            self.store.remote.rest()
        self.misses[index] = str(known)
        self.found[index] = None

    def describe(self, report: Report, placed: Sequence[tuple[int, int]]) -> None:
        """Fill in the report's part about chunks, each's slot and recomputed tokens given."""
        report.bytes_read = sum(entry.bytes_read for entry in self._opened)
        if self.chunks:
            tokens = sum(len(piece.segment) for piece in self.pieces if piece)
            self.store.costs.measure_chunks(len(self.chunks), tokens)
        for chunk, piece, found, miss, (slot, count) in zip(
            self.chunks, self.pieces, self.found, self.misses, placed, strict=True
        ):
            assert piece is not None
            served = found if found and miss != CHEAPER else None
            report.chunks.append(
                ChunkReport(
                    chunk.source,
                    len(piece.segment),
                    count,
                    served.candidate.mode if served else "",
                    "" if served else miss,
                    served.tier if served else "",
                    slot,
                )
            )

    def abandon(self) -> None:
        """The request failed: read no further."""
        for loading in self.loadings:
            loading.abandon()

    def settle(self) -> None:
        """What need not be done before the answer: keep, count, compile what is missing."""
        used: dict[str, list[Candidate]] = {}
        for found in self.found:
            if found:
                used.setdefault(found.candidate.library.name, []).append(found.candidate)
        for candidates in used.values():
            candidates[0].library.touch([c.key for c in candidates])
        for candidate, entry, kv, since in self._read:
            candidate.library.keep(candidate.key, entry, kv, since)
        if self.loadings:
            measure(self.store.costs, self.loadings)
        for loading in self.loadings:
            self.store.later(partial(_keep, loading))
        if self.rule.reads:
            missing = [
                chunk
                for chunk, found, miss in zip(self.chunks, self.found, self.misses, strict=True)
                if found is None and miss != CHEAPER
            ]
            self.engine.compile_later(missing)
        if self._uncertain:
            self.engine.measure_later([p.segment for p in self.pieces if p and p.reused])
        passed = [i for i, miss in enumerate(self.misses) if miss == CHEAPER]
        if passed:
            self.engine.look_again(self.chunks[passed[0]], self.found[passed[0]])


def _keep(loading: Loading) -> None:
    candidate = loading.found.candidate
    try:
        candidate.library.keep(candidate.key, loading.entry, loading.finish(), loading.since)
    except LoadError as error:
        known = error.error
        if isinstance(known, StoreError | OSError):
            candidate.library.fault(candidate.key, known, loading.entry.tier)
