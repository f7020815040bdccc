"""Processes that are killed at any instant while they write leave a store that is intact."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_entry import same, sample

from mpic_rag.store import Store

WRITER = """
import random, sys
sys.path.insert(0, sys.argv[1])
from test_entry import sample
from mpic_rag.store import Store
store, draw = Store(sys.argv[2], memory=0), random.Random(int(sys.argv[3]))
print("ready", flush=True)
while True:
    n = draw.randrange(30)
    if draw.random() < 0.1:
        store.dynamic.delete([f"{n:064x}"])
    store.dynamic.put(f"{n:064x}", sample(300, seed=n), f"page {n % 5}")
"""


def kill_writers(folder, rounds, processes=4):
    """Start writers and kill them; returns what is wrong afterwards, and how many entries stood."""
    draw, here = random.Random(0), str(Path(__file__).parent)
    problems, entries = [], 0
    for round_ in range(rounds):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, here, folder, str(round_ * processes + n)],
                stdout=subprocess.PIPE,
            )
            for n in range(processes)
        ]
        for writer in writers:
            writer.stdout.readline()
        for writer in writers:
            time.sleep(draw.random() * 0.3)
            writer.send_signal(signal.SIGKILL)
        for writer in writers:
            writer.wait()
            writer.stdout.close()
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
