"""pydantic-ai's agents with its OpenAI model and its default settings."""

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import (  # type: ignore[import-not-found]  # lives in .venv-clients
    Agent,
    NativeOutput,
)
from pydantic_ai.models.openai import OpenAIChatModel  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

HELLO = "Who is there?"


class Verdict(BaseModel):
    """A verdict that even a model of random weights can give."""

    colour: Literal["red", "green"]
    is_sure: bool


async def main(url: str) -> None:
    """Send all requests."""
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    whole = await Agent(model).run(HELLO)
    async with Agent(model).run_stream(HELLO) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    as_tool = await Agent(model, output_type=Verdict).run(HELLO)
    native = await Agent(model, output_type=NativeOutput(Verdict)).run(HELLO)
    found = {
        "text": whole.output,
        "tokens": whole.usage.output_tokens,
        "streamed": "".join(pieces),
        "verdict": as_tool.output.model_dump(),
        "native": native.output.model_dump(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
