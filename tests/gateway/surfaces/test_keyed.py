"""API keys with the other clients: each shows its key its own way, and is refused in its own words."""

from collections.abc import AsyncIterator

import aiohttp
import anthropic
import ollama
import pytest

from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.gateway.access.test_keys import CLOSED, SECRET, give
from tests.gateway.fake_engine import FakeEngine, running
from tests.gateway.surfaces.answering import says
from tests.gateway.world import Running, World, deployment, running_gateway
from tests.support.waiting import until

HELLO: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def closed() -> AsyncIterator[Running]:
    world = World(MemoryTransport(SystemClock()))
    await give(world, SECRET, models=("m",))
    async with (
        running(FakeEngine("m-0", says("Hi"))) as engine,
        running_gateway(world.transport, CLOSED) as gateway,
    ):
        await world.serve("m", engine)
        await world.put(deployment("hidden"))
        await gateway.knows("hidden", ready=0)
        await gateway.knows("m", ready=1)
        await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
        yield gateway


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
            with pytest.raises(ollama.ResponseError, match=f"not for the model '{name}'") as caught:
                await client.show(name)
            assert caught.value.status_code == 403
    async with ollama.AsyncClient(closed.url) as stranger:
        with pytest.raises(ollama.ResponseError, match="API key") as caught:
            await stranger.chat("m", [{"role": "user", "content": "hello"}])
        assert caught.value.status_code == 401
        with pytest.raises(ollama.ResponseError, match=r"^This gateway wants an API key"):
            await stranger.list()
    # How clients find out that there is an Ollama, before they have a key.
    async with http.get(closed.url + "/") as response:
        assert response.status == 200
