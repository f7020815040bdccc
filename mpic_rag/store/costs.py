"""Load or compute: what is quicker here, by what was measured here."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import NamedTuple

from mpic_rag.store.remote import AHEAD

TELLING = 32  # units of work whose time says something about a model
RECENT = 0.3  # weight of the newest measurement
LEAN = 0.95  # of loading's seconds must be enough to compute: what loading takes is surer
WORTH = 0.85  # a plan must promise this share of the simpler one's seconds to be preferred


@dataclass
class Tier:
    """Moving averages of one tier: seconds of a look-up, bytes a second of what follows."""

    latency: float
    bandwidth: float
    looks: int = 0
    samples: int = 0


class Load(NamedTuple):
    """An entry that could be loaded: its tier, its bytes, and the work of computing it, about.

    Work is in tokens, their attention to what stands before them included as further ones.
    `beside`: large enough to be loaded while the model runs; `needed`: it knows what computing
    would not find out.
    """

    tier: str
    size: int
    work: float
    beside: bool
    needed: bool = False


def _tiers() -> dict[str, Tier]:
    """Guesses to start from, on the side of trying."""
    return {"disk": Tier(1e-4, 1e9), "remote": Tier(0.02, 1e8)}


@dataclass
class Costs:
    """Measured speeds of tiers, and of prefill by model; kept in `path` between runs."""

    path: Path | None = None
    tiers: dict[str, Tier] = field(default_factory=_tiers)
    token_s: dict[str, float] = field(
        default_factory=dict
    )  # seconds a unit of work, by model and device
    pass_s: dict[str, float] = field(default_factory=dict)  # seconds of a pass over hardly any
    chunk_tokens: float = 256.0  # of a retrieved chunk

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._measured: Counter[str] = Counter()  # prefills in this process, by model
        try:
            kept = json.loads(self.path.read_text()) if self.path else {}
            self.tiers |= {name: Tier(**t) for name, t in kept.get("tiers", {}).items()}
            self.token_s |= {str(k): float(v) for k, v in kept.get("token_s", {}).items()}
            self.pass_s |= {str(k): float(v) for k, v in kept.get("pass_s", {}).items()}
            self.chunk_tokens = float(kept.get("chunk_tokens", self.chunk_tokens))
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # none yet, or damaged ones: figures only, they are measured again

    def save(self) -> None:
        """Keep the figures; a store that can't be written to does without."""
        if self.path:
            part = self.path.with_suffix(".part")
            figures = {
                "tiers": {name: asdict(tier) for name, tier in self.tiers.items()},
                "token_s": self.token_s,
                "pass_s": self.pass_s,
                "chunk_tokens": self.chunk_tokens,
            }
            try:
                part.write_text(json.dumps(figures))
                part.replace(self.path)
            except OSError:
                return

    def measure_look(self, tier: str, seconds: float) -> None:
        """Take in how long a request's look-up took, small entries' transfer with it."""
        with self._lock:
            it = self.tiers[tier]
            it.latency += (RECENT if it.looks else 1.0) * (seconds - it.latency)
            it.looks += 1

    def measure_load(self, tier: str, size: int, seconds: float) -> None:
        """Take in that `size` bytes came in `seconds`, latency and all."""
        with self._lock:
            it = self.tiers[tier]
            speed = size / max(seconds - it.latency, seconds / 2, 1e-6)
            it.bandwidth += (RECENT if it.samples else 1.0) * (speed - it.bandwidth)
            it.samples += 1

    def measure_chunks(self, count: int, tokens: int) -> None:
        """Take in how long the chunks of a request are."""
        with self._lock:
            mean = tokens / count
            self.chunk_tokens += RECENT * (mean - self.chunk_tokens)

    def measure_prefill(self, model: str, work: float, seconds: float) -> None:
        """Take in a pass of so much work; little tells what any pass costs, more what it adds."""
        with self._lock:
            if work < TELLING:
                old = self.pass_s.get(model, seconds)
                self.pass_s[model] = old + RECENT * (seconds - old)
                return
            speed = max(0.0, seconds - self.pass_s.get(model, 0.0)) / work
            count, old = self._measured[model], self.token_s.get(model, speed)
            # A process's first pass is slow; its second says more than what others measured.
            self.token_s[model] = old + (0.0, 1.0, RECENT)[min(count, 2)] * (speed - old)
            self._measured[model] += 1

    def uncertain(self, model: str, loads: Sequence[Load]) -> bool:
        """Whether a prefill should be measured, before these are loaded once more."""
        if model not in self.token_s:
            return True
        free = [load for load in loads if not load.needed]
        load_s = sum(self.load_s(load.tier, load.size) for load in free)
        compute_s = self.token_s[model] * sum(load.work for load in free)
        return self._measured[model] < 2 and load_s > compute_s / 4

    def to_compute(self, model: str, loads: Sequence[Load], work: float = 0.0) -> set[int]:
        """Which of these are better computed than loaded, where so much must be computed anyway.

        What is loaded beside computing, layer by layer, takes as long as the longer of the two.
        Mixed plans must promise a good deal more than loading or computing everything.
        """
        rate = self.token_s.get(model)
        if rate is None:
            return set()
        load_s = [self.load_s(load.tier, load.size) for load in loads]
        compute_s = [inf if load.needed else rate * load.work for load in loads]
        order = sorted(range(len(loads)), key=lambda i: compute_s[i] / (load_s[i] + 1e-9))

        def plan_s(m: int) -> float:
            """Seconds where the first m of `order` are computed."""
            first = sum(load_s[i] for i in order[m:] if not loads[i].beside)
            beside = sum(load_s[i] for i in order[m:] if loads[i].beside)
            return first + max(beside, rate * work + sum(compute_s[i] for i in order[:m]))

        simple = len(order) if plan_s(len(order)) < LEAN * plan_s(0) else 0
        mixed = min(range(len(order) + 1), key=plan_s)
        return set(order[: mixed if plan_s(mixed) < WORTH * plan_s(simple) else simple])

    def worth_asking(self, tier: str, model: str, chunks: int, size: int, work: float) -> bool:
        """Whether chunks of `size` bytes in a far tier would come sooner than by computing them."""
        rate, it = self.token_s.get(model), self.tiers[tier]
        if rate is None or not it.looks or not chunks:
            return True
        load_s = it.latency + max(0.0, size - chunks * AHEAD) / it.bandwidth
        return load_s < rate * work

    def load_s(self, tier: str, size: int) -> float:
        """Expected seconds for bytes of a tier, once they flow."""
        return size / self.tiers[tier].bandwidth if tier in self.tiers else 0.0
