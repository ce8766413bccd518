"""Stored responses outlive their gateway, which is killed with -9 or whose disk takes no more."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from store.etcd.connect import connect
from tests.support.etcd import running_etcd
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_responses_engine import respond
from tests.support.gateway_world import World
from tests.support.ports import free_port
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(240)]


@asynccontextmanager
async def gateway_process(etcd: str, state: Path, limit: str = "unlimited") -> AsyncIterator[str]:
    """Yield the URL of a gateway that ends by kill -9. `limit`: of a file it writes, in blocks of `ulimit`."""
    port = free_port()
    flags = ("--port", str(port), "--etcd", etcd, "--state-dir", str(state))
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", f'ulimit -f {limit}; exec "$@"', "sh"),
        *(sys.executable, "-m", "gateway", *flags),
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        await process.wait()


async def connected(url: str) -> openai.AsyncOpenAI:
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    async def is_up() -> bool:
        try:
            return [model.id async for model in client.models.list()] == ["m"]
        except openai.APIError:
            return False

    await until_async(is_up, limit_s=60, what="the gateway")
    return client


@pytest.mark.ci
async def test_kill_9_loses_no_response(tmp_path: Path) -> None:
    async def script(call: Call) -> None:
        if b"hang" in call.body:
            await asyncio.Event().wait()
        await respond(call)

    async with running_etcd(tmp_path) as etcd, running(FakeEngine("m-0", script)) as engine:
        await World(connect(etcd.address)).serve("m", engine)
        state = tmp_path / "state"
        async with gateway_process(str(etcd.address), state) as url, await connected(url) as client:
            first = await client.responses.create(model="m", input="one")
            async with client.responses.stream(
                model="m", input="two", previous_response_id=first.id
            ) as stream:
                second = await stream.get_final_response()
            begun = await client.responses.create(model="m", input="hang", background=True)
        async with gateway_process(str(etcd.address), state) as url, await connected(url) as client:
            assert (await client.responses.retrieve(second.id)).output_text == second.output_text
            third = await client.responses.create(
                model="m", input="three", previous_response_id=second.id
            )
            assert third.output_text == "5 items"

            async def has_failed() -> bool:
                return (await client.responses.retrieve(begun.id)).status == "failed"

            await until_async(has_failed, limit_s=90, what="the end of the background response")
        other = tmp_path / "other"
        async with gateway_process(str(etcd.address), other) as url, await connected(url) as client:
            with pytest.raises(openai.NotFoundError, match="another gateway has it"):
                await client.responses.retrieve(second.id)


@pytest.mark.ci
async def test_a_full_disk_costs_no_answer(tmp_path: Path) -> None:
    async with running_etcd(tmp_path) as etcd, running(FakeEngine("m-0", respond)) as engine:
        await World(connect(etcd.address)).serve("m", engine)
        state = tmp_path / "state"
        async with (
            gateway_process(str(etcd.address), state, limit="2048") as url,
            await connected(url) as client,
        ):
            large = await client.responses.with_raw_response.create(
                model="m", input="x" * 1_200_000
            )
            assert "not stored" in large.headers["warning"]
            assert large.parse().output_text == "1 items"
            with pytest.raises(openai.NotFoundError, match="could not be stored"):
                await client.responses.retrieve(large.parse().id)
            small = await client.responses.create(model="m", input="x")
            assert (await client.responses.retrieve(small.id)).output == small.output
