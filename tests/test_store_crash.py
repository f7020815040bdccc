"""Processes that are killed at any instant while they write leave a store that is intact."""

import multiprocessing
import random
import time

import pytest
from test_entry import same, sample

from mpic_rag.store import Store

# Writers are forked from a server that has imported all they need: that takes seconds.
SERVER = multiprocessing.get_context("forkserver")


def write(folder, seed, ready):
    store, draw = Store(folder, memory=0), random.Random(seed)
    ready.set()
    while True:
        n = draw.randrange(30)
        if draw.random() < 0.1:
            store.dynamic.delete([f"{n:064x}"])
        store.dynamic.put(f"{n:064x}", sample(300, seed=n), f"page {n % 5}")


def kill_writers(folder, rounds, processes=4):
    """Start writers and kill them; returns what is wrong afterwards, and how many entries stood."""
    draw = random.Random(0)
    problems, entries = [], 0
    SERVER.set_forkserver_preload([__name__, "mpic_rag.store"])
    for round_ in range(rounds):
        flags = [SERVER.Event() for _ in range(processes)]
        writers = [
            SERVER.Process(target=write, args=(folder, round_ * processes + n, flag))
            for n, flag in enumerate(flags)
        ]
        for writer in writers:
            writer.start()
        for flag in flags:
            assert flag.wait(60)
        for writer in writers:
            time.sleep(draw.random() * 0.3)
            writer.kill()
        for writer in writers:
            writer.join()
        store = Store(folder, memory=0)
        for row in list(store.dynamic.rows()):
            entry = store.dynamic.open(row.key)
            if entry and not same(entry.kv(features=True), sample(300, seed=int(row.key, 16))):
                problems.append(f"{row.key} is another entry")
            entries += bool(entry)
        store.dynamic.check()
        problems += store.dynamic.check()
        files = list((store.dynamic.folder / "entries").rglob("*.val"))
        problems += ["a stray file"] * (len(files) != len(list(store.dynamic.rows())))
        problems += [str(path) for path in store.root.rglob("*.part")]
        problems += set(store.faults.counts) - {"vanished"}
        store.close()
    return problems, entries


def test_killed_writers(tmp_path):
    problems, entries = kill_writers(tmp_path, 2)
    assert problems == []
    assert entries > 10


@pytest.mark.slow
def test_two_hundred_killed_writers(tmp_path):
    problems, entries = kill_writers(tmp_path, 50)
    assert problems == []
    assert entries > 250
