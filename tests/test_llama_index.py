"""Stock LlamaIndex with nothing changed but `llm=`, and our own engines."""

import asyncio

import pytest
from llama_index.core import (
    MockEmbedding,
    QueryBundle,
    Settings,
    StorageContext,
    VectorStoreIndex,
)
from llama_index.core.agent import ReActAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import Document as LlamaDocument
from llama_index.core.schema import ImageNode, MediaResource, Node, NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool

from mpic_rag import Model, guide
from mpic_rag.chat_engine import LinkedChatEngine
from mpic_rag.documents import Picture
from mpic_rag.llm import LinkedLLM
from mpic_rag.prompt_helper import LinkedPromptHelper
from mpic_rag.query_engine import LinkedQueryEngine, LinkedSynthesizer

QUESTION = "who keeps larkmouth?"


@pytest.fixture(scope="module")
def bundled():
    return Model.load(device="cpu")


@pytest.fixture
def llm(bundled, make_engine, monkeypatch):
    llm = LinkedLLM(make_engine(bundled), max_tokens=8)
    # Two of the nine modes build a synthesizer without the `llm=` that they were given.
    monkeypatch.setattr(Settings, "_llm", llm)
    return llm


@pytest.fixture
def nodes(tmp_path):
    """The first shelf, one node a part, in stock classes; pictures are files with a caption."""
    made = []
    for page in guide.shelves()["shelf-1"]:
        for n, part in enumerate(part for chunk in page.chunks for part in chunk.parts):
            node = Node(id_=f"{page.name}-{n}", metadata={"file_name": f"{page.name}.md"})
            node.excluded_llm_metadata_keys = ["file_name"]
            if isinstance(part, Picture):
                node.text_resource = MediaResource(text=f"the picture of {page.name}")
                path = tmp_path / f"{node.node_id}.png"
                path.write_bytes(part.data)
                node.image_resource = MediaResource(path=path)
            else:
                node.text_resource = MediaResource(text=part)
            source = LlamaDocument(id_=page.name, text="-").as_related_node_info()
            node.relationships = {"1": source}
            made.append(node)
    return made


@pytest.fixture
def index(nodes):
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))


class Spy:
    """Keeps what the model was shown."""

    def __init__(self, llm, monkeypatch):
        self.raws = []
        answer = LinkedLLM._answer

        def spied(this, *args):
            for response in answer(this, *args):
                if response.raw:
                    self.raws.append(response.raw)
                yield response

        monkeypatch.setattr(LinkedLLM, "_answer", spied)

    def hit(self, tokens):
        """Share of so many retrieved tokens that were reused."""
        return sum(raw["reused_tokens"] for raw in self.raws) / tokens


def tokens(llm, found, pictures):
    """What retrieved nodes take."""
    count = llm.engine.model.count
    total = 0
    for node in (n.node for n in found):
        total += count(node.text_resource.text)
        if pictures and node.image_resource:
            total += count(Picture(_bytes(node)))
    return total


def _bytes(node):
    return node.image_resource.path.read_bytes()


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_swapping_the_llm_hits(llm, index, nodes, monkeypatch, multimodal, stream):
    assert llm.compile(nodes) > 0
    assert llm.compile(nodes) == 0
    spy = Spy(llm, monkeypatch)
    engine = index.as_query_engine(
        llm=llm, similarity_top_k=8, multimodal=multimodal, streaming=stream
    )
    response = engine.query(QUESTION)
    text = "".join(response.response_gen) if stream else response.response
    assert text
    assert len(spy.raws) == 1 or multimodal  # 2125 tokens a picture, thinks LlamaIndex
    assert spy.hit(tokens(llm, response.source_nodes, multimodal)) >= 0.9
    if multimodal:
        spy.raws.clear()
        synthesizer = get_response_synthesizer(
            llm=llm,
            multimodal=True,
            streaming=stream,
            chat_prompt_helper=LinkedPromptHelper(llm),
        )
        engine = index.as_query_engine(
            llm=llm, similarity_top_k=8, response_synthesizer=synthesizer
        )
        response = engine.query(QUESTION)
        assert "".join(response.response_gen) if stream else response.response
        assert len(spy.raws) == 1
        assert spy.hit(tokens(llm, response.source_nodes, True)) >= 0.9


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("mode", list(ResponseMode))
def test_every_mode_runs(llm, index, nodes, mode, multimodal):
    llm.compile(nodes)
    engine = index.as_query_engine(
        llm=llm, response_mode=mode, multimodal=multimodal, similarity_top_k=3
    )
    response = engine.query(QUESTION)
    assert len(response.source_nodes) == 3


def test_stock_splitter_and_metadata(llm, monkeypatch):
    """Text with metadata that the model sees; the chunk's own text still hits."""
    pages = guide.shelves()["shelf-1"]
    texts = [
        " ".join(p for c in page.chunks for p in c.parts if isinstance(p, str)) for page in pages
    ]
    documents = [LlamaDocument(text=text, metadata={"title": "guide"}) for text in texts]
    parsed = SentenceSplitter(chunk_size=40, chunk_overlap=5).get_nodes_from_documents(documents)
    assert len(parsed) > len(documents)
    llm.compile(parsed)
    spy = Spy(llm, monkeypatch)
    index = VectorStoreIndex(parsed, embed_model=MockEmbedding(embed_dim=4))
    response = index.as_query_engine(llm=llm, similarity_top_k=6).query(QUESTION)
    shown = sum(llm.engine.model.count(n.node.text.strip()) for n in response.source_nodes)
    assert spy.hit(shown) >= 0.9


@pytest.mark.parametrize("mode", [ChatMode.CONTEXT, ChatMode.CONDENSE_QUESTION, ChatMode.SIMPLE])
def test_stock_chat_engines(llm, index, nodes, mode):
    llm.compile(nodes)
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=2)
    assert chat.chat(QUESTION).response
    assert "".join(chat.stream_chat("what does it ship?").response_gen)
    assert len(chat.chat_history) == 4


def test_fusion_and_replaced_text(llm, nodes, monkeypatch):
    llm.compile(nodes)
    for node in nodes:
        node.metadata["window"] = f"a window around {node.node_id}"
        node.excluded_llm_metadata_keys.append("window")
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
    spy = Spy(llm, monkeypatch)
    retriever = QueryFusionRetriever(
        [index.as_retriever(similarity_top_k=4), index.as_retriever(similarity_top_k=6)],
        num_queries=1,
        llm=MockLLM(),
        use_async=False,
    )
    engine = LinkedQueryEngine.from_args(
        retriever, llm, node_postprocessors=[MetadataReplacementPostProcessor("window")]
    )
    response = engine.query(QUESTION)
    texts = [n.node.text_resource.text for n in response.source_nodes]
    assert all(text.startswith("a window around") for text in texts)
    (raw,) = spy.raws  # the texts are new, so none may hit; the pictures are the same
    for chunk in raw["chunks"]:
        assert bool(chunk["hit"]) == (chunk["tokens"] > 30)


class Reversed(BaseNodePostprocessor):
    """Stands for a reranker."""

    def _postprocess_nodes(self, nodes, query_bundle=None):
        return [NodeWithScore(node=n.node, score=1.0) for n in nodes[::-1]]


@pytest.mark.parametrize("way", ["sync", "stream", "async", "async stream"])
def test_our_engine_keeps_the_order(llm, index, nodes, way):
    llm.compile(nodes)
    engine = LinkedQueryEngine.from_args(
        index.as_retriever(similarity_top_k=6),
        llm,
        node_postprocessors=[Reversed()],
        streaming="stream" in way,
    )

    async def asked():
        response = await engine.aquery(QUESTION)
        if "stream" in way:
            return response, "".join([piece async for piece in response.async_response_gen()])
        return response, response.response

    if "async" in way:
        response, text = asyncio.run(asked())
    else:
        response = engine.query(QUESTION)
        text = (
            "".join(response.response_gen)
            if isinstance(response, StreamingResponse)
            else response.response
        )
    assert text
    fate = response.metadata["mpic_rag"]
    assert fate["left_out"] == []
    order = [n.node.node_id for n in response.source_nodes]
    retrieved = index.as_retriever(similarity_top_k=6).retrieve(QUESTION)
    assert order == [n.node.node_id for n in retrieved][::-1]
    assert list(fate["nodes"]) == order
    slots = [chunk["slot"] for chunks in fate["nodes"].values() for chunk in chunks]
    assert slots == sorted(slots)
    assert all(chunk["hit"] for chunks in fate["nodes"].values() for chunk in chunks)
    assert fate["recomputed_tokens"] == 0


def test_captions_and_the_querys_own_picture_reach_the_model(llm, nodes, tmp_path):
    picture = next(Picture(_bytes(n)) for n in nodes if n.image_resource)
    path = tmp_path / "query.png"
    path.write_bytes(picture.data)
    synthesizer = LinkedSynthesizer(llm)
    node = ImageNode(text="a caption that tells", image_path=str(path))
    query = QueryBundle("what is it?", image_path=str(path))
    prompt = synthesizer.prompt(query, [NodeWithScore(node=node)])
    kinds = [block.block_type for block in prompt.message.blocks]
    assert kinds == ["text", "image", "image", "text"]
    assert prompt.message.blocks[0].text == "a caption that tells"
    response = synthesizer.synthesize(query, [NodeWithScore(node=node)])
    assert response.response
    fresh = response.metadata["mpic_rag"]["fresh_tokens"]
    assert fresh > llm.engine.model.count(picture)


def test_packing_by_real_counts(llm, nodes):
    """Stock code counts 2125 tokens a picture: here all sixteen nodes fit in one call."""
    synthesizer = LinkedSynthesizer(llm)
    found = [NodeWithScore(node=node) for node in nodes]
    assert not synthesizer.prompt(QueryBundle(QUESTION), found).left_out
    many = [NodeWithScore(node=TextNode(text=f"{n}. " + "fog is common. " * 200)) for n in range(9)]
    prompt = synthesizer.prompt(QueryBundle(QUESTION), many)
    assert prompt.left_out
    assert prompt.left_out == [n.node.node_id for n in many[len(prompt.shown) :]]
    response = synthesizer.synthesize(QUESTION, many)
    fate = response.metadata["mpic_rag"]
    assert fate["left_out"] == prompt.left_out
    assert fate["usage"]["prompt_tokens"] <= llm.metadata.context_window - 8


def test_citations(llm, index, nodes, monkeypatch):
    engine = LinkedQueryEngine.from_args(index.as_retriever(similarity_top_k=3), llm, cite=True)
    chat = LinkedLLM.chat

    def cited(self, messages, **kwargs):
        response = chat(self, messages, **kwargs)
        response.message.content = "as the page says [2][9]"
        return response

    monkeypatch.setattr(LinkedLLM, "chat", cited)
    response = engine.query(QUESTION)
    assert response.metadata["mpic_rag"]["cited"] == [response.source_nodes[1].node.node_id]


def test_nothing_retrieved(llm):
    assert (
        LinkedSynthesizer(llm, empty_response="nothing").synthesize("q", []).response == "nothing"
    )


def test_our_chat_engine_stands_on_its_turns(llm, index, nodes):
    llm.compile(nodes)
    chat = LinkedChatEngine.from_args(index.as_retriever(similarity_top_k=3), llm)
    first = chat.chat(QUESTION)
    assert len(first.source_nodes) == 3
    before = first.metadata["mpic_rag"]["usage"]["total_tokens"]
    second = chat.chat("what does it ship?")
    fate = second.metadata["mpic_rag"]
    assert fate["cached_tokens"] >= before - 1
    assert not any(fate["nodes"].values())  # they stand in the first turn
    assert len(second.source_nodes) == 3
    streamed = chat.stream_chat("why?")
    assert "".join(streamed.response_gen)
    assert len(chat.chat_history) == 6

    async def ask():
        answer = await chat.achat("and who?")
        streamed = await chat.astream_chat("since when?")
        return answer.response, [p async for p in streamed.async_response_gen()]

    assert all(asyncio.run(ask()))
    assert len(chat.chat_history) == 10
    chat.reset()
    assert chat.chat_history == []


def test_old_turns_make_room(llm, index, nodes):
    chat = LinkedChatEngine.from_args(index.as_retriever(similarity_top_k=1), llm)
    long = [
        ChatMessage(role="user", content="fog is common. " * 400),
        ChatMessage(role="assistant", content="yes."),
    ]
    chat.chat(QUESTION, chat_history=[*long, *long])
    assert len(chat.chat_history) == 4


def test_an_agent_uses_the_engine(llm, index, nodes):
    """A scripted model drives the agent; ours answers for the tool."""
    llm.compile(nodes)
    engine = LinkedQueryEngine.from_args(index.as_retriever(similarity_top_k=3), llm)
    tool = QueryEngineTool.from_defaults(engine, name="guide", description="knows the stations")
    script = iter(
        [
            'Thought: I need the guide.\nAction: guide\nAction Input: {"input": "who keeps it?"}',
            "Thought: I can answer.\nAnswer: the keeper is known.",
        ]
    )

    class Scripted(MockLLM):
        def _said(self):
            from llama_index.core.base.llms.types import ChatResponse

            text = next(script)
            return ChatResponse(message=ChatMessage(role="assistant", content=text), delta=text)

        async def achat(self, messages, **kwargs):
            return self._said()

        async def astream_chat(self, messages, **kwargs):
            async def gen():
                yield self._said()

            return gen()

    async def run():
        agent = ReActAgent(tools=[tool], llm=Scripted())
        return await agent.run("who keeps larkmouth?")

    assert "the keeper is known" in str(asyncio.run(run()))


def test_moved_and_edited_files(llm, nodes, tmp_path):
    llm.compile(nodes)
    path = tmp_path / "sign.png"
    picture = next(_bytes(n) for n in nodes if n.image_resource)
    path.write_bytes(picture)
    synthesizer = LinkedSynthesizer(llm)

    def hits():
        node = Node(image_resource=MediaResource(path=path))
        response = synthesizer.synthesize(QUESTION, [NodeWithScore(node=node)])
        return [c["hit"] for cs in response.metadata["mpic_rag"]["nodes"].values() for c in cs]

    assert hits() == ["document"]
    path.rename(tmp_path / "other.png")
    path = tmp_path / "other.png"
    assert hits() == ["document"]
    other = next(_bytes(n) for n in nodes[::-1] if n.image_resource)
    path.write_bytes(other[:-12] + b"\x00\x00\x00\x00IEND\xaeB`\x82" + b" ")
    assert hits() == [""]


def test_the_index_survives_being_stored(llm, index, nodes, tmp_path):
    """Stock storage; texts hit after a reload, since content is the key."""
    texts = [n for n in nodes if not n.image_resource]
    stored = VectorStoreIndex(texts, embed_model=MockEmbedding(embed_dim=4))
    stored.storage_context.persist(str(tmp_path / "index"))
    llm.compile(texts)
    context = StorageContext.from_defaults(persist_dir=str(tmp_path / "index"))
    from llama_index.core import load_index_from_storage

    again = load_index_from_storage(context, embed_model=MockEmbedding(embed_dim=4))
    response = LinkedQueryEngine.from_args(again.as_retriever(similarity_top_k=4), llm).query("q")
    chunks = [c for cs in response.metadata["mpic_rag"]["nodes"].values() for c in cs]
    assert chunks
    assert all(c["hit"] == "document" for c in chunks)
