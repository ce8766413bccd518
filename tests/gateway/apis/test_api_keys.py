"""API keys with the other APIs: each client sends its key in its own way and gets errors in its own format."""

import aiohttp
import anthropic
import ollama
import pytest

from tests.support.gateway_calls import SECRET
from tests.support.gateway_world import Running

HELLO: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hello"}]


async def test_anthropics_client(closed: Running) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=closed.url, api_key=SECRET, max_retries=0
    ) as client:
        done = await client.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert getattr(done.content[0], "text", "") == "Hi"
        assert [model.id async for model in client.models.list()] == ["m"]
        with pytest.raises(anthropic.APIStatusError, match="permission_error"):
            await client.messages.create(model="hidden", max_tokens=9, messages=HELLO)
        stranger = client.with_options(api_key="sk-fleet-wrong")
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await stranger.messages.create(model="m", max_tokens=9, messages=HELLO)


async def test_ollamas_client(closed: Running, http: aiohttp.ClientSession) -> None:
    headers = {"authorization": f"Bearer {SECRET}"}
    async with ollama.AsyncClient(closed.url, headers=headers) as client:
        done = await client.chat("m", [{"role": "user", "content": "hello"}])
        assert done.message.content == "Hi"
        assert [model.model for model in (await client.list()).models] == ["m"]
        for name in ("hidden", "no-such"):
            with pytest.raises(
                ollama.ResponseError, match=f"may not use the model '{name}'"
            ) as caught:
                await client.show(name)
            assert caught.value.status_code == 403
    async with ollama.AsyncClient(closed.url) as stranger:
        with pytest.raises(ollama.ResponseError, match="API key") as caught:
            await stranger.chat("m", [{"role": "user", "content": "hello"}])
        assert caught.value.status_code == 401
        with pytest.raises(ollama.ResponseError, match=r"^This gateway requires an API key"):
            await stranger.list()
    # Clients detect an Ollama server by this, before they have a key.
    async with http.get(closed.url + "/") as response:
        assert response.status == 200
