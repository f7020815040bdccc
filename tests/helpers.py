"""What several tests look up."""


def key(engine, chunk):
    """The key under which the engine's own library has a chunk."""
    return engine.compiler.key(chunk, engine.libraries[0])


def value_file(library, key):
    """The file of an entry."""
    (row,) = (row for row in library.rows() if row.key == key)
    return library.folder / "entries" / row.file
