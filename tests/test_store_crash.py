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
    draw = random.Random(0)
    here = str(Path(__file__).parent)
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
            if entry:
                n = int(row.key, 16)
                assert same(entry.kv(features=True), sample(300, seed=n))
        store.dynamic.check()
        assert store.dynamic.check() == []
        files = list((store.dynamic.folder / "entries").rglob("*.val"))
        assert len(files) == len(list(store.dynamic.rows()))
        assert not list(store.root.rglob("*.part"))
        assert set(store.faults.counts) <= {"vanished"}
        store.close()


def test_killed_writers(tmp_path):
    kill_writers(tmp_path, 2)


@pytest.mark.slow
def test_two_hundred_killed_writers(tmp_path):
    kill_writers(tmp_path, 50)
