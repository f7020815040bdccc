"""Trains the bundled model: python data/train.py --out data/model [--resume] [--seed 0].

The order matters: without it a model this small never binds a question to the right station.
First random sequences that repeat (text layers), then naming what pictures show (vision tower),
then shelves of the guide, which grow as soon as questions about the present size are answered.
While it reads, the states of the second layer must also tell which station each token is about;
that loss is what makes a model this small look for the name at all. All contexts are causal.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from mpic_rag.data import architecture, sight
from mpic_rag.data.fast import Muon, answer_logits, check, hidden_states
from mpic_rag.data.layout import Batch, Layout, Talk, collate
from mpic_rag.data.lessons import LEVELS, Spellings, copy_batch, draw
from mpic_rag.data.start import prepare
from mpic_rag.data.words import vocabulary
from mpic_rag.data.world import make_shelf

TAP = 2  # layers before the states that must tell the station
TOPIC = 0.5  # weight of that loss
FOUND = 0.3  # weight of looking where the answer stands
RATES = {"muon": 0.01, "adam": 2e-3}
NO_MASK = torch.zeros(0)
T = TypeVar("T")


class Trainer:
    """The model, its optimisers and how far it is."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.rng = random.Random(args.seed)
        self.coin = random.Random(args.seed + 1)  # drawing runs in another thread
        self.tokenizer = architecture.build_tokenizer()
        self.layout = Layout(self.tokenizer)
        self.model = Model(architecture.build_config(self.tokenizer)).float()
        prepare(self.model)
        self.table = self.model.get_input_embeddings().weight
        self.spellings = Spellings(self.layout, len(self.tokenizer))
        self.table.data[self.spellings.spaced] += 0.1 * torch.randn(192)
        self.spellings.tie(self.table)
        self.values = torch.tensor(sorted(set(self.layout.spellings.values())))
        self.rank = torch.zeros(len(self.tokenizer), dtype=torch.long)
        self.rank[self.values] = torch.arange(len(self.values))
        named = [(n, p) for n, p in self.model.named_parameters() if "lm_head" not in n]
        matrices = [p for n, p in named if p.ndim == 2 and "embed_tokens" not in n]
        chosen = {id(p) for p in matrices}
        self.others = [p for _, p in named if id(p) not in chosen]
        self.optimisers = {
            "muon": Muon(matrices, lr=RATES["muon"]),
            "adam": torch.optim.AdamW(
                self.others, lr=RATES["adam"], betas=(0.9, 0.98), weight_decay=0.0, fused=True
            ),
        }
        self.phase, self.level, self.step, self.since = "copy", 0, 0, 0
        self.right: dict[str, float] = {}
        self.loss, self.seconds = 0.0, 0.0

    def save(self, name: str = "last.pt") -> None:
        """Keeps what `--resume` needs."""
        self.args.work.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {k: o.state_dict() for k, o in self.optimisers.items()}
        state["model"] = self.model.state_dict()
        state |= {k: getattr(self, k) for k in ("phase", "level", "step", "right", "seconds")}
        torch.save(state, self.args.work / (name + ".new"))
        (self.args.work / (name + ".new")).replace(self.args.work / name)

    def resume(self) -> None:
        """Goes on from the last checkpoint."""
        state = torch.load(self.args.work / "last.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        for key, optimiser in self.optimisers.items():
            optimiser.load_state_dict(state[key])
        for key in ("phase", "level", "step", "right", "seconds"):
            setattr(self, key, state[key])
        self.rng.seed(self.args.seed + self.step)

    def _update(self, loss: Tensor, decay: float = 1.0) -> None:
        warm = min(1.0, (self.since + 1) / 30)
        for key, optimiser in self.optimisers.items():
            for group in optimiser.param_groups:
                group["lr"] = RATES[key] * decay * warm
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimiser in self.optimisers.values():
            optimiser.step()
        self.spellings.tie(self.table)
        self.loss = 0.95 * self.loss + 0.05 * loss.item() if self.loss else loss.item()
        self.step, self.since = self.step + 1, self.since + 1

    def _note(self, kind: str, right: float, weight: float = 0.02) -> None:
        self.right[kind] = self.right.get(kind, right) * (1 - weight) + weight * right

    def _line(self) -> str:
        kinds = " ".join(f"{k}={v:.3f}" for k, v in sorted(self.right.items()))
        return f"{self.seconds / 60:6.1f} min {self.phase} {self.step} {self.loss:.3f} {kinds}"

    def _until(
        self, done: Callable[[], bool], step: Callable[[T], None], make: Callable[[], T]
    ) -> None:
        """Steps on batches made in another thread, with a line now and then, until done."""
        self.since, saved = 0, time.time()
        with ThreadPoolExecutor(1) as pool:
            queue: list[Future[T]] = [pool.submit(make)]
            while not done():
                began = time.time()
                queue.append(pool.submit(make))
                step(queue.pop(0).result())
                self.seconds += time.time() - began
                if self.step % 20 == 0:
                    print(self._line(), flush=True)
                if time.time() - saved > 60:
                    self.save()
                    saved = time.time()
        print(f"done: {self._line()}", flush=True)
        self.right, self.loss, self.step = {}, 0.0, 0

    def _copy(self, batch: tuple[Tensor, int]) -> None:
        ids, period = batch
        for start in range(0, ids.shape[1], period):  # often in another spelling, as answers are
            table = self.coin.choice((self.spellings.as_bare, self.spellings.as_spaced))
            ids[:, start : start + period] = table[ids[:, start : start + period]]
        positions = torch.arange(ids.shape[1]).expand(3, len(ids), -1)
        embeds = self.model.get_input_embeddings()(ids)
        hidden = hidden_states(self.model, embeds, positions, ids.shape[1], NO_MASK)[0]
        logits = self.model.lm_head(hidden[:, period:-1]).flatten(0, 1)
        target = ids[:, period + 1 :].flatten()
        self._note("copy", float((logits.argmax(-1) == target).float().mean()), 0.1)
        self._update(F.cross_entropy(logits, target))

    def _look(self, shown: sight.Album) -> None:
        losses = []
        for kind, loss, right in sight.losses(self.model, self.layout, shown):
            self._note(kind, right, 0.05)
            losses.append(loss)
        self._update(torch.stack(losses).sum(), max(0.05, 1 - self.step / self.args.looks))

    def _read(self, batch: Batch) -> None:
        logits, states, looks = answer_logits(self.model, batch, TAP)
        targets = batch.ids.flatten()[batch.target_places]
        hits = (logits.argmax(-1) == targets).tolist()
        for first, end, kind in batch.answers:
            if batch.level == self.level:
                self._note(kind, float(all(hits[first:end])))
        loss = F.cross_entropy(logits, targets)
        for name, places, wanted in (
            ("topic", batch.topic_places, batch.topics),
            ("asked", batch.clue_places, batch.clues),
        ):
            seen = F.rms_norm(states[places], states.shape[-1:])
            guess, target = seen @ self.table[self.values].T, self.rank[wanted]
            if batch.level == self.level:
                self._note(name, float((guess.argmax(-1) == target).float().mean()), 0.1)
            loss = loss + TOPIC * F.cross_entropy(guess, target)
        found = (looks[batch.source_places] * batch.sources).sum(-1)
        for hop, name in enumerate(("clue", "found")):
            looked = found[batch.source_places[0] == hop]
            if len(looked):
                self._note(name, float(looked.detach().mean()), 0.1)
                loss = loss - FOUND * looked.clamp_min(1e-6).log().mean()
        fade = (self.args.steps - self.step) / (self.args.steps * self.args.fade)
        self._update(loss, min(1.0, max(0.02, fade)) * (1.0 if self.level < 3 else 0.6))

    def _climb(self) -> bool:
        """Goes to the next level if the present one is mastered; true when all steps are done."""
        scores = [
            v
            for k, v in self.right.items()
            if k not in ("describe", "topic", "asked", "clue", "found", "compare")
        ]
        mean = sum(scores) / max(1, len(scores))
        if self.since >= 40 and scores and mean >= LEVELS[self.level].goal:
            print(f"level {self.level} mastered: {self._line()}", flush=True)
            self.level, self.right, self.since = self.level + 1, {}, 30
            self.save(f"level-{self.level}.pt")
        return self.step >= self.args.steps

    def run(self) -> None:
        """All phases that are left."""
        probe = collate([self._probe()], self.layout)
        difference = check(self.model, probe)
        print(f"difference to transformers: {difference:.2e}", flush=True)
        if difference > 1e-3:
            raise RuntimeError("the fast forward pass does not match transformers")
        if self.phase == "copy":
            texts = [space + w for w in vocabulary() for space in ("", " ")] + list(
                "0123456789,.:?"
            )
            tokens = [self.layout.encode(t)[0] for t in texts]
            self._until(
                lambda: self.right.get("copy", 0) > 0.95,
                self._copy,
                lambda: copy_batch(self.rng, tokens),
            )
            self.phase = "look"
        if self.phase == "look":
            self._until(
                lambda: self.step >= self.args.looks, self._look, lambda: sight.album(self.rng)
            )
            self.phase = "read"
            self.save("look.pt")
        self.model.model.visual.requires_grad_(False)  # else it forgets what it can't yet show
        self._until(self._climb, self._read, lambda: draw(self.rng, self.layout, self.level))
        self.save()

    def _probe(self) -> Talk:
        rng = random.Random(1)
        shelf = make_shelf(rng, 2, 2, 2)
        talk = self.layout.talk(rng, shelf, list(shelf.questions[:1]))
        return Talk(talk.context, talk.branches[:1])

    def export(self) -> None:
        """Saves in bfloat16, as `from_pretrained` reads it."""
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        self.model.to(torch.bfloat16).save_pretrained(out)
        self.tokenizer.save_pretrained(out)
        architecture.build_processor(self.tokenizer).save_pretrained(out)
        architecture.generation_config(self.tokenizer).save_pretrained(out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/model"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/train"), help="checkpoints")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--looks", type=int, default=500, help="steps for the vision tower")
    parser.add_argument("--steps", type=int, default=2760, help="steps on shelves")
    parser.add_argument("--fade", type=float, default=0.21, help="share of them that slows down")
    parser.add_argument("--seed", type=int, default=0)
    trainer = Trainer(parser.parse_args())
    if trainer.args.resume:
        trainer.resume()
    trainer.run()
    trainer.export()


if __name__ == "__main__":
    main()
