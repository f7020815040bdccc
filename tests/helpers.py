"""What several tests share."""

from test_entry import sample

from mpic_rag.store import Candidate, StoreError


def key(engine, chunk):
    """The key under which the engine's own library has a chunk."""
    return engine.compiler.key(chunk, engine.libraries[0])


def value_file(library, key):
    """The file of an entry."""
    (row,) = (row for row in library.rows() if row.key == key)
    return library.folder / "entries" / row.file


def key_of(n):
    return f"{n:064x}"


def fill(library, count, document="", **kwargs):
    for n in range(count):
        library.put(key_of(n), sample(seed=n, **kwargs), document)


def read(store, n, library=None):
    """The entry as a request would get it, kept in memory as a request would keep it."""
    library = library or store.dynamic
    (found,) = store.find([[Candidate("document", library, key_of(n))]])
    if found is None:
        return None
    if found.tier == "memory":
        return found.entry.kv
    since = library.mark()
    try:
        entry = found.entry if found.tier == "remote" else library.disk.open(found.entry)
        kv = entry.kv(features=True)
    except (StoreError, OSError) as error:
        library.fault(key_of(n), error, found.tier)
        return None
    library.keep(key_of(n), entry, kv, since)
    return kv
