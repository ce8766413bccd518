"""Files and batches through OpenAI's own client."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import openai
import orjson
import pytest
from openai.types import Batch

from gateway.batches.database import BatchStore
from gateway.batches.records import StoredFile
from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.support.gateway_calls import put_api_key
from tests.support.gateway_engine_scripts import chat, completion
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.waiting import until, until_async

CHAT: Final = "/v1/chat/completions"


def line(custom_id: str, model: str = "m", **more: object) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": custom_id}]}
    given = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **more}
    return json.dumps(given)


@pytest.fixture
async def gateway(world: World, tmp_path: Path) -> AsyncIterator[Running]:
    limits = GatewayLimits(drain_timeout_s=0.0, resume_timeout_s=5.0, state_dir=tmp_path / "state")
    async with running_gateway(world.transport, limits) as found:
        yield found


def client_of(gateway: Running, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
async def client(gateway: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(gateway) as openai_client:
        yield openai_client


async def begin(client: openai.AsyncOpenAI, *lines: str) -> Batch:
    content = "\n".join(lines).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "tests"}
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch, status: str = "completed") -> Batch:
    found = batch

    async def is_over() -> bool:
        nonlocal found
        found = await client.batches.retrieve(batch.id)
        return found.status in ("completed", "failed", "expired", "cancelled")

    await until_async(is_over, limit_s=60, what="the end of the batch")
    assert found.status == status, found
    return found


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, object]]:
    assert file_id is not None
    content = (await client.files.content(file_id)).text
    return {one["custom_id"]: one for one in map(json.loads, content.splitlines())}


async def test_a_batch_from_its_file_to_its_answers(
    gateway: Running, client: openai.AsyncOpenAI
) -> None:
    await gateway.serve(chat)
    batch = await begin(client, *(line(f"q{at}") for at in range(9)), line("lost", "nobody"))
    assert (batch.status, batch.metadata) == ("validating", {"for": "tests"})
    done = await ended(client, batch)
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (10, 9, 1)
    answers = await results(client, done.output_file_id)
    assert list(answers) == [f"q{at}" for at in range(9)]
    response = answers["q3"]["response"]
    assert isinstance(response, dict)
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["message"]["content"] == "hello from m-0"
    lost = (await results(client, done.error_file_id))["lost"]["response"]
    assert isinstance(lost, dict)
    assert lost["status_code"] == 404
    assert "does not exist" in lost["body"]["error"]["message"]
    assert [one.id async for one in client.batches.list()] == [batch.id]
    names = [file_object.filename async for file_object in client.files.list()]
    assert len(names) == 3
    assert (await client.files.delete(batch.input_file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(batch.input_file_id)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([line("a"), line("a")], "two lines"),
        ([line("a", url="/v1/embeddings")], "as the batch says"),
        ([line("a", method="GET")], '"POST"'),
        ([line("a", body={"model": "m", "stream": True})], "whole"),
        (["[]"], "Expected"),
        ([""], "no requests"),
    ],
)
async def test_a_wrong_input_fails_with_its_line(
    gateway: Running, client: openai.AsyncOpenAI, lines: list[str], says: str
) -> None:
    await until(lambda: gateway.gateway.table_cache.is_synced)
    failed = await ended(client, await begin(client, *lines), "failed")
    assert failed.errors is not None
    assert failed.errors.data
    assert says in (failed.errors.data[0].message or "")


async def test_refusals(gateway: Running, client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="24h"):
        await client.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="1h",  # type: ignore[arg-type]  # as a client might
        )
    with pytest.raises(openai.NotFoundError, match="There is no 'file-x'"):
        await client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="files serve batches alone"):
        await client.files.create(file=("x", b"x"), purpose="assistants")
    with pytest.raises(openai.NotFoundError, match="batch_x"):
        await client.batches.cancel("batch_x")


async def test_a_cancelled_batch_keeps_its_results(
    gateway: Running, client: openai.AsyncOpenAI
) -> None:
    async def once(call: Call) -> None:
        if b"q0" in call.body:
            await call.answer(completion("first"))
        else:
            await asyncio.sleep(60)

    (engine,) = await gateway.serve(once)
    batch = await begin(client, *(line(f"q{at}") for at in range(3)))
    await until(lambda: len(engine.calls) == 3, what="all requests at the engine")
    await until_async(lambda: _has_completed(client, batch, 1), what="the first result")
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        await client.files.delete(batch.input_file_id)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    done = await ended(client, batch, "cancelled")
    assert len(await results(client, done.output_file_id)) == 1
    await until(lambda: engine.abandoned == 2, what="the engine to be given up")


async def test_clients_come_first(gateway: Running, client: openai.AsyncOpenAI) -> None:
    held = asyncio.Event()

    async def slow(call: Call) -> None:
        await held.wait()
        with contextlib.suppress(ConnectionError):
            await call.answer(completion("late"))

    (engine,) = await gateway.serve(slow)
    async with asyncio.TaskGroup() as group:
        group.create_task(client.chat.completions.create(model="m", messages=[]))
        await until(lambda: len(engine.calls) == 1)
        batch = await begin(client, line("q"))
        await until_async(
            lambda: _has_status(client, batch, "in_progress"), what="the batch to begin"
        )
        await asyncio.sleep(1.0)  # several looks of the runner
        assert len(engine.calls) == 1  # the Mac is not idle
        held.set()
    await ended(client, batch)
    assert len(engine.calls) == 2


async def test_lines_count_in_the_memory_of_bodies_and_wait_for_it(tmp_path: Path) -> None:
    held, running_calls = asyncio.Event(), 0

    async def slow(call: Call) -> None:
        nonlocal running_calls
        running_calls += 1
        assert running_calls == 1
        await held.wait()
        running_calls -= 1
        await call.answer(completion("late"))

    limits = GatewayLimits(
        drain_timeout_s=0.0,
        state_dir=tmp_path / "state",
        max_body_bytes=150_000,
        max_body_memory_bytes=150_000,
    )
    async with (
        running_gateway(limits=limits) as gateway,
        client_of(gateway) as client,
    ):
        (engine,) = await gateway.serve(slow)
        memory = gateway.gateway.handler.body_memory
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 100_000}]}
        batch = await begin(client, line("0", body=body), line("1", body=body))
        await until(lambda: len(engine.calls) == 1, what="the first line")
        assert memory.used == len(engine.calls[0].body)
        await asyncio.sleep(1.0)  # several looks of the runner
        assert len(engine.calls) == 1
        held.set()
        done = await ended(client, batch)
        assert done.request_counts is not None
        assert done.request_counts.completed == 2
        assert memory.used == 0


async def _has_completed(client: openai.AsyncOpenAI, batch: Batch, number: int) -> bool:
    counts = (await client.batches.retrieve(batch.id)).request_counts
    return counts is not None and counts.completed >= number


async def _has_status(client: openai.AsyncOpenAI, batch: Batch, status: str) -> bool:
    return (await client.batches.retrieve(batch.id)).status == status


async def test_a_key_has_its_own_files_and_models(tmp_path: Path) -> None:
    world = World(MemoryTransport(SystemClock()))
    await put_api_key(world, "sk-one", name="one", models=("m",))
    await put_api_key(world, "sk-two", name="two")
    limits = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True, state_dir=tmp_path / "state")
    async with (
        running(FakeEngine("m-0", chat)) as engine,
        running_gateway(world.transport, limits) as gateway,
        client_of(gateway, "sk-one") as openai_client,
        client_of(gateway, "sk-two") as two,
    ):
        await gateway.knows_keys()
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        batch = await begin(openai_client, line("q"), line("other", "n"))
        done = await ended(openai_client, batch)
        errors = await results(openai_client, done.error_file_id)
        response = errors["other"]["response"]
        assert isinstance(response, dict)
        assert response["status_code"] in (403, 404)
        assert [entry.key for entry in gateway.gateway.recorder.journal.last(5)][:1] == ["one"]
        assert [found.id async for found in two.batches.list()] == []
        for call in (two.batches.retrieve(batch.id), two.files.content(done.output_file_id or "")):
            with pytest.raises(openai.NotFoundError):
                await call
        # Another key that gets the name later has nothing of the first, which goes.
        await put_api_key(world, "sk-new", name="one", created=datetime(2026, 2, 2, tzinfo=UTC))
        await until(lambda: gateway.gateway.fleet_state.keyring.find(b"sk-new"), what="the new key")
        new = openai_client.with_options(api_key="sk-new", max_retries=0)
        assert [found.id async for found in new.batches.list()] == []
        assert [file_object.id async for file_object in new.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await new.files.content(batch.input_file_id)
        file_object = await new.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        content = tmp_path / "state" / "batches" / "content"
        assert len(list(content.iterdir())) == 4
    async with running_gateway(world.transport, replace(limits, gone_key_s=0.0)):
        await until(
            lambda: [path.name for path in content.iterdir()] == [file_object.id], what="the end"
        )


async def test_an_upload_of_one_key_keeps_no_other_from_uploading(tmp_path: Path) -> None:
    world = World(MemoryTransport(SystemClock()))
    await put_api_key(world, "sk-one", name="one")
    await put_api_key(world, "sk-two", name="two")
    limits = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True, state_dir=tmp_path / "state")
    async with (
        running_gateway(world.transport, limits) as gateway,
        client_of(gateway, "sk-one") as openai_client,
        client_of(gateway, "sk-two") as two,
        contextlib.AsyncExitStack() as stack,
    ):
        await gateway.knows_keys()
        port, readers = int(gateway.url.rpartition(":")[2]), list[asyncio.StreamReader]()
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            readers.append(reader)
            stack.callback(writer.close)
            writer.write(
                b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-one\r\n"
                b"content-type: multipart/form-data; boundary=b\r\ncontent-length: 5000\r\n\r\n--b\r\n"
            )
        refused: list[bytes] = []

        async def read_answer(reader: asyncio.StreamReader) -> None:
            refused.append(await reader.readline())

        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(read_answer(reader)) for reader in readers]
            await until(lambda: len(refused) >= 4, what="four refusals")
            for answer in answers:
                answer.cancel()  # the fifth has none: its upload goes on
        assert [line.split()[1] for line in refused] == [b"429"] * 4
        await two.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="uploaded already"):
            await openai_client.files.create(file=("in.jsonl", b"{}"), purpose="batch")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("multipart/form-data; boundary=b; charset=punycode", "charset"),
        ("multipart/form-data", "boundary"),
        ("application/json", "multipart/form-data"),
        ("multipart/form-data; boundary=b; charset=UTF-8", "no field"),
    ],
)
async def test_the_client_names_no_codec(gateway: Running, kind: str, says: str) -> None:
    async with gateway.post(
        "/v1/files", data=b"--b--\r\n", headers={"content-type": kind}
    ) as answer:
        assert answer.status == 400
        assert says in (await answer.json())["error"]["message"]


async def test_without_a_state_folder() -> None:
    async with (
        running_gateway() as gateway,
        client_of(gateway) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="--state-dir") as caught:
            await client.batches.list()
        assert caught.value.status_code == 501


async def test_a_damaged_database_costs_batches_and_no_chat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "state" / "batches"
    BatchStore(folder).close()
    (folder / "batches.db").write_bytes(b"no database" * 100)
    limits = GatewayLimits(drain_timeout_s=0.0, state_dir=tmp_path / "state")
    async with (
        running_gateway(limits=limits) as gateway,
        client_of(gateway) as client,
    ):
        await gateway.serve(chat)
        with pytest.raises(openai.InternalServerError, match="its log says why"):
            await client.batches.list()
        assert "file is not a database" in str(vars(caplog.records[0])["why"])
        assert (await client.chat.completions.create(model="m", messages=[])).choices


async def test_a_retried_request_counts_once(gateway: Running, client: openai.AsyncOpenAI) -> None:
    async def busy_once(call: Call) -> None:
        if len(call.engine.calls) == 1:
            await call.answer(orjson.dumps({"error": {"message": "busy"}}), 429)
        else:
            await call.answer(completion("now"))

    await gateway.serve(busy_once)
    done = await ended(client, await begin(client, line("q")))
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)


async def test_a_folder_that_goes_away_delays_a_batch_and_stops_no_gateway(
    gateway: Running, client: openai.AsyncOpenAI, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = tmp_path / "state" / "batches" / "content"
    held = asyncio.Event()

    async def slow(call: Call) -> None:
        await held.wait()
        await call.answer(completion("late"))

    (engine,) = await gateway.serve(slow)
    batch = await begin(client, line("q"))
    await until(lambda: len(engine.calls) == 1, what="the request at the engine")
    away = content.rename(tmp_path / "away")
    content.touch()  # as a disk that was unplugged: nothing can be written there
    held.set()
    await until_async(lambda: _has_status(client, batch, "finalizing"), what="the batch to end")
    await until(lambda: "cannot take a batch further" in caplog.text, what="a failed attempt")
    with pytest.raises(openai.InternalServerError, match="folder of files and batches"):
        await client.files.content(batch.input_file_id)
    assert (await client.chat.completions.create(model="m", messages=[])).choices
    content.unlink()
    away.rename(content)
    done = await ended(client, batch)
    assert list(await results(client, done.output_file_id)) == ["q"]


async def test_an_upload_that_breaks_off_is_no_error_of_the_gateway(
    gateway: Running, client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(gateway.url.rpartition(":")[2])
    for path, kind in (
        ("files", "multipart/form-data; boundary=b"),
        ("batches", "application/json"),
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n"
        writer.write(f"{head}content-length: 5000\r\n\r\n--b\r\n".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def is_taken() -> bool:
        """Upload a file; it is refused until the gateway notices that the client of the other is gone."""
        with contextlib.suppress(openai.RateLimitError):
            await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
            return True
        return False

    await until_async(is_taken, what="the end of the upload that broke off")
    assert "Traceback" not in caplog.text
    assert "Exception" not in caplog.text


async def test_content_of_no_file_is_deleted_once_it_is_old(tmp_path: Path) -> None:
    """A process that is killed leaves it: before it writes the row, or after it deletes it."""
    store = BatchStore(tmp_path / "batches")
    record = StoredFile(
        id="file-kept", owner="", filename="a", purpose="batch", size=1, created_s=1
    )
    store.add_file(record)
    for name in ("file-kept", "file-lost", ".file-half.x1", "file-new"):
        store.content(name).write_bytes(b"1")
    for name in ("file-kept", "file-lost", ".file-half.x1"):
        os.utime(store.content(name), (1, 1))
    limits = GatewayLimits(drain_timeout_s=0.0, state_dir=tmp_path)
    async with running_gateway(MemoryTransport(SystemClock()), limits):
        await until(lambda: not store.content("file-lost").exists(), what="the end of a leftover")
        await until(lambda: not store.content(".file-half.x1").exists())
    assert {path.name for path in store.content("").iterdir()} == {"file-kept", "file-new"}
    store.close()
