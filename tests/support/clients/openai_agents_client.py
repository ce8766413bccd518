"""OpenAI's Agents SDK with its default settings: the Responses API, and chat completions where asked."""

import asyncio
import json
import sys
from typing import Any, Literal

import agents  # type: ignore[import-not-found]  # lives in .venv-clients
import openai
from pydantic import BaseModel

HELLO = "Who is there?"


class Verdict(BaseModel):
    """A verdict that even a model of random weights can give."""

    colour: Literal["red", "green"]
    is_sure: bool


CALLED: list[str] = []


@agents.function_tool  # type: ignore[untyped-decorator]
def weather(unit: Literal["C", "F"]) -> str:
    """Tell the weather."""
    CALLED.append(unit)
    return f"20 {unit}"


async def asked(agent: Any) -> Any:
    """Return what an agent answers in the end."""
    return (await agents.Runner.run(agent, HELLO)).final_output.model_dump()


async def main(url: str) -> None:
    """Send all requests."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    agents.set_default_openai_client(client, use_for_tracing=False)
    agents.set_tracing_disabled(True)
    found: dict[str, Any] = {}
    for api in ("responses", "chat_completions"):
        agents.set_default_openai_api(api)
        # A schema has an end, unlike a text of random weights.
        judge = agents.Agent(
            name="judge", instructions="You are kind.", model="tiny", output_type=Verdict
        )
        streamed = agents.Runner.run_streamed(judge, HELLO)
        deltas = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        using = agents.Agent(
            name="using",
            model="tiny",
            tools=[weather],
            output_type=Verdict,
            model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False),
        )
        CALLED.clear()
        found[api] = {
            "verdict": await asked(judge),
            "streamed": streamed.final_output.model_dump(),
            "deltas": json.loads("".join(deltas)),
            "after_tool": await asked(using),
            "called": list(CALLED),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
