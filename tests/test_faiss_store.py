"""Our FAISS store does what LlamaIndex's fail at."""

import random

import numpy as np
import pytest
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.schema import (
    MediaResource,
    Node,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)

from mpic_rag.retrievers.faiss_store import FILE, FaissStore
from mpic_rag.retrievers.vectors import Vectors


def node(name, vector, document="d", **metadata):
    made = TextNode(id_=name, text=f"text of {name}", metadata=metadata, embedding=vector)
    made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    return made


def ids(store, vector, k=10, **kwargs):
    query = VectorStoreQuery(query_embedding=vector, similarity_top_k=k, **kwargs)
    return store.query(query).ids


def where(key, value, operator=FilterOperator.EQ):
    return MetadataFilters(filters=[MetadataFilter(key=key, value=value, operator=operator)])


@pytest.fixture
def store():
    store = FaissStore()
    store.add([node("a", [9.0, 0.0]), node("b", [1.0, 1.0], "e", page=2), node("c", [0.0, 0.1])])
    return store


def test_similarity_is_the_cosine_whatever_the_length(store):
    result = store.query(VectorStoreQuery(query_embedding=[0.0, 50.0], similarity_top_k=3))
    assert result.ids == ["c", "b", "a"]
    assert result.similarities == pytest.approx([1.0, 2**-0.5, 0.0], abs=1e-6)
    assert [n.text for n in result.nodes] == ["text of c", "text of b", "text of a"]


def test_ids_are_never_used_again(store):
    store.delete_nodes(["c"])
    store.add([node("d", [0.0, 1.0])])
    assert sorted(ids(store, [1.0, 1.0])) == ["a", "b", "d"]
    assert ids(store, [0.0, 1.0], 1) == ["d"]


def test_delete_by_document(store):
    store.delete("d")
    assert ids(store, [1.0, 0.0]) == ["b"]
    store.delete("nobody")
    assert [n.node_id for n in store.get_nodes()] == ["b"]


def test_adding_again_replaces(store):
    store.add([node("a", [0.0, 1.0], page=7)])
    assert ids(store, [0.0, 1.0], 1) in (["a"], ["c"])
    assert len(ids(store, [0.0, 1.0])) == 3
    assert store.get_nodes(["a"])[0].metadata["page"] == 7


def test_filters_apply_before_the_search(store):
    many = [node(f"n{n}", [1.0, n / 1000], page=n) for n in range(100)]
    store.add(many)
    assert ids(store, [1.0, 0.0], 2, filters=where("page", 97, FilterOperator.GT)) == ["n98", "n99"]
    both = MetadataFilters(
        filters=[where("page", 3), where("page", 5)], condition=FilterCondition.OR
    )
    assert ids(store, [1.0, 0.0], 9, filters=both) == ["n3", "n5"]
    assert ids(store, [1.0, 0.0], 9, doc_ids=["e"]) == ["b"]
    assert ids(store, [1.0, 0.0], 9, node_ids=["c", "gone"]) == ["c"]
    store.delete_nodes(filters=where("page", 0, FilterOperator.GTE))
    assert sorted(ids(store, [1.0, 0.0])) == ["a", "c"]
    with pytest.raises(ValueError, match="clear"):
        store.delete_nodes()


def test_persist_and_reload(store, tmp_path):
    picture = Node(
        id_="p",
        image_resource=MediaResource(data=b"\x89PNG\r\n\x1a\n picture"),
        embedding=[1.0, 0.0],
    )
    store.add([picture])
    store.delete_nodes(["a"])
    store.persist(tmp_path / "x")
    again = FaissStore.from_persist_dir(tmp_path / "x")
    assert ids(again, [1.0, 0.0]) == ids(store, [1.0, 0.0])
    assert again.get_nodes(["p"])[0].image_resource.data == picture.image_resource.data
    again.add([node("z", [1.0, 0.0])])
    assert len(set(ids(again, [1.0, 0.0]))) == 4
    assert not [p for p in (tmp_path / "x").iterdir() if p.name != FILE]


def test_a_failed_save_leaves_the_old_one(store, tmp_path, monkeypatch):
    store.persist(tmp_path)
    store.add([node("new", [1.0, 0.0])])

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("mpic_rag.retrievers.vectors.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        store.persist(tmp_path)
    assert len(FaissStore.from_persist_dir(tmp_path).get_nodes()) == 3
    assert [p.name for p in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_damaged_files_are_said_to_be(store, tmp_path, damage):
    store.persist(tmp_path)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[: len(data) // 2] if damage is None else damage)
    with pytest.raises(ValueError, match="damaged"):
        FaissStore.from_persist_dir(tmp_path)


def test_wrong_widths_are_refused(store):
    with pytest.raises(ValueError, match="another embedding model"):
        store.add([node("w", [1.0, 2.0, 3.0])])
    with pytest.raises(ValueError, match="another embedding model"):
        ids(store, [1.0])


def test_under_a_vector_store_index(tmp_path):
    store = FaissStore()
    context = StorageContext.from_defaults(vector_store=store)
    embed = MockEmbedding(embed_dim=4)
    nodes = [node(n, None, f"doc-{n}") for n in "abc"]
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=embed)
    index.delete_ref_doc("doc-b")
    store.persist(tmp_path)
    again = VectorStoreIndex.from_vector_store(FaissStore.from_persist_dir(tmp_path), embed)
    found = again.as_retriever(similarity_top_k=9).retrieve("q")
    assert sorted(n.node.node_id for n in found) == ["a", "c"]
    again.insert_nodes([node("b", None, "doc-b")])
    assert len(again.as_retriever(similarity_top_k=9).retrieve("q")) == 3


def test_random_changes_against_numpy():
    """What numpy says over a plain dictionary is what the index says, whatever was done to it."""
    draw, rng = random.Random(3), np.random.default_rng(3)
    vectors, plain = Vectors(8), {}
    for _ in range(300):
        key = f"k{draw.randrange(40)}"
        if draw.random() < 0.6:
            plain[key] = rng.normal(size=8).astype(np.float32)
            vectors.add([key], plain[key][None])
        else:
            assert vectors.remove([key]) == (plain.pop(key, None) is not None)
        assert set(vectors) == set(plain)
        if not plain:
            continue
        query = rng.normal(size=8).astype(np.float32)
        among = draw.sample(sorted(plain), draw.randint(1, len(plain)))
        cosines = {
            k: float(plain[k] @ query / np.linalg.norm(plain[k]) / np.linalg.norm(query))
            for k in among
        }
        best = sorted(cosines, key=cosines.get, reverse=True)[:5]
        found = vectors.search(query, 5, among)
        assert [k for k, _ in found] == best
        assert [s for _, s in found] == pytest.approx([cosines[k] for k in best], abs=1e-5)
