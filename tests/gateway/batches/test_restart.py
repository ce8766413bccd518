"""A batch outlives its gateway, which is killed with -9 while requests of it run."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import openai
import orjson
import pytest

from store.etcd.connect import connect
from tests.support.etcd import running_etcd
from tests.support.gateway_engine_scripts import completion
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import World
from tests.support.ports import free_port
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(240)]
CHAT: Final = "/v1/chat/completions"
_LINES = 12


def line(number: int) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": f"q{number}"}]}
    return json.dumps({"custom_id": f"q{number}", "method": "POST", "url": CHAT, "body": body})


@pytest.mark.ci
async def test_kill_9_loses_no_result_and_no_request(tmp_path: Path) -> None:
    answered: Counter[str] = Counter()
    holds = asyncio.Event()

    async def some(call: Call) -> None:
        """Answer six requests, and the others only after the restart."""
        text = orjson.loads(call.body)["messages"][0]["content"]
        if len(answered) >= 6:
            await holds.wait()
        answered[text] += 1
        await call.answer(completion(text))

    async with running_etcd(tmp_path) as etcd, running(FakeEngine("m-0", some)) as engine:
        await World(connect(etcd.address)).serve("m", engine)
        port = free_port()
        flags = ("--port", str(port), "--etcd", str(etcd.address))

        async def start() -> asyncio.subprocess.Process:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", *flags, "--state-dir", str(tmp_path / "state")),
                stderr=subprocess.DEVNULL,
            )

        first = await start()
        url = f"http://127.0.0.1:{port}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

        async def completed(batch: str, number: int) -> bool:
            try:
                found = await client.batches.retrieve(batch)
            except openai.APIError:
                return False
            return found.request_counts is not None and found.request_counts.completed >= number

        async def is_up() -> bool:
            try:
                return [model.id async for model in client.models.list()] == ["m"]
            except openai.APIError:
                return False

        try:
            await until_async(is_up, limit_s=60, what="the gateway")
            content = "\n".join(map(line, range(_LINES))).encode()
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            await until_async(lambda: completed(batch.id, 6), limit_s=60, what="six results")
            before = set(answered)
            await until(lambda: len(engine.calls) > 6, limit_s=60, what="requests that run")
        finally:
            first.kill()
            await first.wait()
        holds.set()
        second = await start()
        try:
            await until_async(lambda: completed(batch.id, _LINES), limit_s=60, what="all results")

            async def is_over() -> bool:
                return (await client.batches.retrieve(batch.id)).status == "completed"

            await until_async(is_over, limit_s=60, what="the files")
            done = await client.batches.retrieve(batch.id)
            output = (await client.files.content(done.output_file_id or "")).text
        finally:
            second.kill()
            await second.wait()
            await client.close()
    names = [json.loads(one)["custom_id"] for one in output.splitlines()]
    assert names == [f"q{number}" for number in range(_LINES)]
    # What was on the disk did not run again.
    assert {answered[name] for name in before} == {1}
