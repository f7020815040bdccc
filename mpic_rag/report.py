"""What an answer cost: seconds by stage, tokens by origin, and each chunk's fate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch

STAGES = ("lookup", "load", "render", "link", "select", "prefill")


@dataclass(frozen=True)
class ChunkReport:
    """One retrieved chunk: `hit` names the entry that served it, or `miss` says why none did.

    `tier` is where the entry lay: memory, disk or remote; `slot` is its first token's index.
    """

    source: str
    tokens: int
    recomputed: int
    hit: str = ""
    miss: str = ""
    tier: str = ""
    slot: int = 0


@dataclass
class Report:
    """One turn. Seconds by stage add up to `ttft_s`, up to a little glue.

    `lookup` is hashing and naming, `load` reading entries, `render` tokens and vision features of
    what no entry gave; `later_s` has the seconds of each token after the first. `retrieve_s`, which
    an index needs to find and pack its passages, comes before all that. `scored` is what choosing
    tokens cost, as a share of a full prefill's work in the language model.
    """

    selector: str
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    retrieve_s: float = 0.0
    ttft_s: float = 0.0
    later_s: list[float] = field(default_factory=list)
    chunks: list[ChunkReport] = field(default_factory=list)
    cached_tokens: int = 0
    fresh_tokens: int = 0
    bytes_read: int = 0
    scored: float = 0.0

    @property
    def chunk_tokens(self) -> int:
        """Tokens of the retrieved chunks."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def recomputed_tokens(self) -> int:
        """Chunk tokens that went through the model in this turn, whether or not stored."""
        return sum(chunk.recomputed for chunk in self.chunks)

    @property
    def reused_tokens(self) -> int:
        """Chunk tokens whose stored state was used."""
        return self.chunk_tokens - self.recomputed_tokens

    @property
    def recomputed(self) -> float:
        """Share of the chunks' token-layers that was computed afresh, 0 to 1."""
        return self.recomputed_tokens / self.chunk_tokens if self.chunks else 0.0

    @property
    def context_tokens(self) -> int:
        """All tokens that the answer could see, before its own."""
        return self.cached_tokens + self.chunk_tokens + self.fresh_tokens


class Stopwatch:
    """Adds up seconds by stage; waits for the device, or a GPU's work would count elsewhere."""

    def __init__(self, report: Report, device: torch.device) -> None:
        self.report = report
        self.device = device
        self.start = perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        begin = perf_counter()
        try:
            yield
        finally:
            self._wait()
            self.report.seconds[name] += perf_counter() - begin

    def token(self) -> None:
        """Note that a token is there."""
        self._wait()
        now = perf_counter()
        if self.report.ttft_s:
            self.report.later_s.append(now - self.start)
        else:
            self.report.ttft_s = now - self.start
        self.start = now

    def resume(self) -> None:
        """Start the next token's time now: the caller's own time between tokens isn't ours."""
        self.start = perf_counter()

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
