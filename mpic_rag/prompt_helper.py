"""LlamaIndex's packing of messages into a context, by the model's own counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.prompt_helper import ChatPromptHelper
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.prompt_utils import get_empty_prompt_messages

from mpic_rag.llm import LinkedLLM


class LinkedPromptHelper(ChatPromptHelper):
    """Puts all messages into one where the model has room for them.

    LlamaIndex's own counts 2125 tokens for every picture, and so asks several times for what fits
    at once. Pass it as `chat_prompt_helper=` to `get_response_synthesizer`.
    """

    _llm: LinkedLLM = PrivateAttr()

    def __init__(self, llm: LinkedLLM) -> None:
        metadata = llm.metadata
        super().__init__(metadata.context_window, metadata.num_output)
        self._llm = llm

    async def arepack(
        self, prompt: BasePromptTemplate, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> Sequence[ChatMessage]:
        """All in one message, or else as LlamaIndex does it."""
        around = self._llm.count(get_empty_prompt_messages(prompt))
        room = self.context_window - self.num_output - around
        if messages and self._llm.count(messages) + len(self._llm.engine.compiler.prefix) <= room:
            blocks = [block for message in messages for block in message.blocks]
            return [ChatMessage(role=messages[0].role, blocks=blocks)]
        return await super().arepack(prompt, messages, **kwargs)
