"""The saved journal: it survives kill -9, torn and damaged lines, a full disk, and stays bounded."""

import asyncio
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.forwarding.retry_state import Attempt
from gateway.limits import GatewayLimits
from gateway.telemetry.request_journal import (
    JournalEntry,
    RequestJournal,
    render_entries,
    rows_json,
)
from gateway.telemetry.saved_journal import SavedJournal, decode_entry, encode_entries
from machinery.clock import SystemClock
from tests.support.gateway_calls import send_chats
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_world import World, journal_entry, running_gateway, target
from tests.support.waiting import until


def entry(number: int, **fields: Any) -> JournalEntry:
    """Return an entry of a request that was tried twice, in a session of a key."""
    tries = (
        Attempt(target("m-0").name, "broken", 1.0, 1.5, "it died"),
        Attempt(target("m-1").name, "answered", 1.5, 1.75),
    )
    values = {"key": "anna", "session": "0123456789ab", "attempts": tries, "queued_s": 0.25}
    values |= {"time_s": 1000.125 + number / 7, "served_by": target("m-1").name}
    return journal_entry(number, **{**values, **fields})


def saved(path: Path, size: int = 100) -> tuple[SavedJournal, RequestJournal]:
    journal = RequestJournal(size)
    return SavedJournal(path, journal, SystemClock(), size=size), journal


def ids(journal: RequestJournal) -> list[str]:
    return [item.request_id for item in journal.last(10_000)][::-1]


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(entry(1), id="answered"),
        pytest.param(entry(2, served_by=None, attempts=(), session="", key=""), id="refused"),
        pytest.param(entry(3, model="caf\u00e9 \U0001f30d" + "x" * 120), id="strange-name"),
        pytest.param(
            entry(4, attempts=(Attempt(target("m-0", port=9).name, "unreachable", 0.0, 9.0, "x"),)),
            id="another-port",
        ),
    ],
)
def test_an_entry_is_shown_as_before(one: JournalEntry) -> None:
    line = encode_entries([one])
    assert line.index(b"\n") == len(line) - 1
    assert decode_entry(line) == one


def test_each_entry_is_a_line() -> None:
    entries = [entry(number) for number in range(4)]
    assert [decode_entry(line) for line in encode_entries(entries).splitlines()] == entries


@given(st.binary(max_size=300))
def test_any_line_is_an_entry_or_skipped(line: bytes) -> None:
    decoded = decode_entry(line)
    assert decoded is None or render_entries([decoded], "gw")


def test_damaged_values_are_skipped() -> None:
    """A line with a changed value is shown or skipped."""
    saved_values = json.loads(encode_entries([entry(1)]))
    for at in range(len(saved_values)):
        values: tuple[object, ...] = (None, "x", -1, [], {}, [[0]], 1e300)
        for value in values:
            changed = [*saved_values[:at], value, *saved_values[at + 1 :]]
            decoded = decode_entry(json.dumps(changed).encode())
            assert decoded is None or rows_json(render_entries([decoded], "gw"))


def test_a_torn_last_line_costs_one_entry(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    saver, _ = saved(path)
    saver.write([entry(1), entry(2)])
    path.write_bytes(path.read_bytes()[:-20])
    saver, journal = saved(path)
    assert saver.restore() == 1
    saver.write([entry(3)])
    _, journal = reopened = saved(path)
    assert reopened[0].restore() == 2
    assert ids(journal) == ["r-1", "r-3"]


def test_the_files_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    saver, _ = saved(path, size=10)
    for number in range(3000):
        saver.write([entry(number)])
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["requests.jsonl", "requests.jsonl.1"]
    assert all(file.stat().st_size < 300 << 10 for file in files)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    again, journal = saved(path, size=10)
    again.restore()
    assert ids(journal) == [f"r-{number}" for number in range(2990, 3000)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_costs_entries_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Writing goes on when there is room."""
    path = tmp_path / "requests.jsonl"
    path.symlink_to("/dev/full")
    saver, _ = saved(path)
    saver.write([entry(1)])
    saver.write([entry(2)])
    assert [line for line in saver.lines() if not line.startswith("#")] == [
        "fleet_gateway_journal_unsaved_total 2"
    ]
    assert [record.message for record in caplog.records] == [
        "cannot save the journal; a restart forgets requests"
    ]
    path.unlink()
    saver.write([entry(3)])
    again, journal = saved(path)
    assert again.restore() == 1
    assert ids(journal) == ["r-3"]


def test_a_disk_that_fills_up_within_a_line(tmp_path: Path) -> None:
    """Later lines do not continue the part that was written."""
    path = tmp_path / "requests.jsonl"
    saver, _ = saved(path)
    # The limit of a file's size lets the kernel write a part, as a full disk does.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        saver.write([entry(1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == 200
    saver.write([entry(2)])
    again, journal = saved(path)
    assert again.restore() == 1
    assert ids(journal) == ["r-2"]


async def test_entries_are_saved_while_it_runs_and_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    saver, journal = saved(path, size=1000)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(saver.run())
        journal.extend([entry(number) for number in range(200)])
        await until(
            lambda: path.exists() and path.read_bytes().count(b"\n") == 200, what="200 lines"
        )
        journal.extend([entry(200)])
        task.cancel()
    again, restored = saved(path, size=1000)
    assert again.restore() == 201
    assert ids(restored) == [f"r-{number}" for number in range(201)]
    # What was restored is not written again.
    async with asyncio.TaskGroup() as group:
        task = group.create_task(again.run())
        restored.extend([entry(201)])
        await until(lambda: path.read_bytes().count(b"\n") == 202, what="one more line")
        task.cancel()
    assert path.read_bytes().count(b"\n") == 202


async def test_a_gateway_starts_with_the_requests_of_the_last(world: World, tmp_path: Path) -> None:
    """Recorders are not told of them again: they would count them twice."""
    path = tmp_path / "requests.jsonl"
    limits = GatewayLimits(drain_timeout_s=0.0, saved_journal=path)
    async with running_gateway(world.transport, limits) as gateway:
        await gateway.serve(chat)
        await send_chats(gateway.http, gateway, 3)
    async with running_gateway(world.transport, limits) as gateway:
        await gateway.serve(chat)
        await send_chats(gateway.http, gateway, 1)
        async with gateway.get("/api/requests/ended") as response:
            rows = (await response.json())["requests"]
        assert [row["replica"] for row in rows] == ["m-0"] * 4
        feeds, url = [], f"{gateway.url}/api/dashboard/feed"
        for after in ("", "1.5~unknown"):
            async with gateway.http.get(url, params={"after": after}) as response:
                feeds.append(await response.json())
        assert [len(feed["requests"]) for feed in feeds] == [1, 1]
        # A recorder that knows the last entry before the restart gets what came since.
        before = feeds[0]["requests"][0]
        assert before["id"] == rows[0]["id"]
        text = path.read_text().splitlines()
        assert len(text) >= 3
        last = json.loads(text[2])
        cursor = f"{last[0]!r}~{last[1]}"
        async with gateway.http.get(url, params={"after": cursor}) as response:
            feed = await response.json()
        assert feed["isComplete"]
        assert [row["id"] for row in feed["requests"]] == [rows[0]["id"]]
