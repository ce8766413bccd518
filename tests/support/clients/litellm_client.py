"""LiteLLM, which sends the same requests as to three providers: OpenAI's, Anthropic's and Ollama's API."""

import asyncio
import json
import sys
from typing import Any

import litellm  # type: ignore[import-not-found]  # lives in .venv-clients

HELLO = [{"role": "user", "content": "hello"}]
litellm.suppress_debug_info = True


def providers(url: str) -> dict[str, dict[str, Any]]:
    """Return the common arguments of each provider's calls."""
    return {
        "openai": {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none"},
        "anthropic": {"model": "anthropic/tiny", "api_base": url, "api_key": "none"},
        "ollama_chat": {"model": "ollama_chat/tiny", "api_base": url},
        "ollama": {"model": "ollama/tiny", "api_base": url},
    }


async def streamed(**call: Any) -> dict[str, Any]:
    """Return the joined content of a stream."""
    text, finish = "", None
    async for part in await litellm.acompletion(stream=True, **call):
        text += part.choices[0].delta.content or ""
        finish = part.choices[0].finish_reason or finish
    return {"text": text, "finish": finish}


def whole(**call: Any) -> dict[str, Any]:
    """Return a response and its usage."""
    done = litellm.completion(**call)
    choice = done.choices[0]
    return {
        "text": choice.message.content,
        "finish": choice.finish_reason,
        "prompt": done.usage.prompt_tokens,
        "completion": done.usage.completion_tokens,
    }


def refused(**call: Any) -> str:
    """Return the error class for an unknown model."""
    provider = call["model"].split("/")[0]
    try:
        litellm.completion(**{**call, "model": f"{provider}/nobody"})
    except Exception as error:  # noqa: BLE001 - whatever LiteLLM makes of it
        return f"{type(error).__name__}: {error}"
    return "none"


async def main(url: str) -> None:
    """Send all requests to all providers."""
    found: dict[str, Any] = {}
    for name, given in providers(url).items():
        call = {**given, "messages": HELLO, "max_tokens": 8, "temperature": 0, "num_retries": 0}
        found[name] = {
            "whole": whole(**call),
            "streamed": await streamed(**call),
            "refused": refused(**call),
        }
        if name in ("openai", "ollama"):
            made = litellm.embedding(input=["hello", "there"], **given)
            found[name]["widths"] = [len(one["embedding"]) for one in made.data]
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
