"""LangChain's OpenAI client with its default settings."""

import json
import sys
from typing import Literal

from langchain_core.tools import tool  # type: ignore[import-not-found]  # lives in .venv-clients
from langchain_openai import ChatOpenAI, OpenAIEmbeddings  # type: ignore[import-not-found]
from pydantic import BaseModel

HELLO = [("system", "You are kind."), ("human", "Who is there?")]


class Verdict(BaseModel):
    """A verdict that even a model of random weights can give."""

    colour: Literal["red", "green"]
    is_sure: bool


@tool  # type: ignore[untyped-decorator]  # its package is in another environment
def weather(unit: Literal["C", "F"]) -> str:
    """Tell the weather."""
    return f"20 {unit}"


def main(url: str) -> None:
    """Send all requests."""
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny")
    whole = chat.invoke(HELLO)
    pieces = list(chat.stream(HELLO))
    called = chat.bind_tools([weather], tool_choice="any").invoke(HELLO)
    # Its default cuts texts into tokens of OpenAI's models, and asks the network for their vocabulary.
    embeddings = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model="tiny", check_embedding_ctx_length=False
    )
    found = {
        "text": whole.content,
        "finish": whole.response_metadata["finish_reason"],
        "tokens": whole.usage_metadata["output_tokens"],
        "streamed": "".join(piece.content for piece in pieces),
        "streamed_tokens": sum((p.usage_metadata or {}).get("output_tokens", 0) for p in pieces),
        "verdict": chat.with_structured_output(Verdict).invoke(HELLO).model_dump(),
        "calls": [[call["name"], call["args"]] for call in called.tool_calls],
        "widths": [len(vector) for vector in embeddings.embed_documents(["hello", "there"])],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
