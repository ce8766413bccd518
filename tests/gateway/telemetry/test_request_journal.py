"""The journal: ring, file, time series, and entries of real requests."""

import asyncio
import json
import logging
import os
from pathlib import Path

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits import GatewayLimits
from gateway.metrics.response_summary import parse_usage
from gateway.telemetry.request_journal import (
    JournalWriter,
    RequestJournal,
    render_entries,
    rows_json,
    session_digest,
)
from gateway.telemetry.time_series import SERIES_METRICS, STEP_S, STEPS, RateSeries
from machinery.clock import SystemClock
from schemas.wire.requests import EndedRequest
from tests.support.gateway_calls import CHAT
from tests.support.gateway_engine_scripts import chat, dies_at_once
from tests.support.gateway_world import Running, journal_entry, running_gateway
from tests.support.sampling import samples
from tests.support.waiting import until


def test_the_ring_keeps_the_last() -> None:
    journal = RequestJournal(3)
    outcomes = ("failed", "ok", "failed", "ok", "failed")
    journal.extend([journal_entry(number, outcome=one) for number, one in enumerate(outcomes)])
    assert [item.request_id for item in journal.last(10)] == ["r-4", "r-3", "r-2"]
    assert [item.request_id for item in journal.last(1)] == ["r-4"]
    failed = journal.last(10, outcomes=frozenset({"failed"}))
    assert [item.request_id for item in failed] == ["r-4", "r-2"]
    assert journal.last(10, model="other") == journal.last(10, node="mac-2") == []
    assert len(journal.last(10, model="m", node="mac-1")) == 3


def test_a_node_that_failed_is_found_too() -> None:
    journal = RequestJournal(3)
    journal.extend([journal_entry(served_by=None, outcome="failed")])
    assert len(journal.last(1, node="mac-1")) == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=20))
@settings(max_examples=samples(500, quick=30))
def test_a_reader_gets_each_entry_once_or_learns_that_it_is_lost(
    turns: list[tuple[int, int]],
) -> None:
    journal, total, cursor = RequestJournal(7, "run"), 0, ""
    read: list[str] = []
    lost = 0
    # At the end it reads the rest.
    for added, count in [(0, 0), *turns, (0, 7)]:
        journal.extend([journal_entry(total + number) for number in range(added)])
        total += added
        page = journal.page_after(cursor, count)
        cursor = page.cursor
        assert len(page.entries) <= count
        assert page.lost is not None
        lost += page.lost
        read += [item.request_id for item in page.entries]
    assert len(read) + lost == total
    assert read == sorted(set(read), key=lambda one: int(one[2:]))
    assert journal.page_after(cursor, 7).entries == []


@pytest.mark.parametrize(
    ("cursor", "expected", "lost"),
    [
        pytest.param("", [4, 5], 0, id="a-new-reader-has-what-was-restored"),
        pytest.param("first:9~1002.0~r-2", [3, 4], 0, id="a-place-of-the-earlier-run"),
        pytest.param("1002.0~r-2", [3, 4], 0, id="as-earlier-releases-wrote-it"),
        pytest.param("first:9~1009.0~r-9", [4, 5], None, id="an-entry-that-was-not-saved"),
        pytest.param("second:4~1003.0~r-3", [4, 5], 0, id="its-own-place"),
        pytest.param("second:5", [5], 0, id="without-an-entry"),
        pytest.param("second:0~", [1, 2], 1, id="dropped-since"),
        pytest.param("second:99~1009.0~r-9", [4, 5], None, id="a-place-that-is-not-there-yet"),
        pytest.param("second:-1", [4, 5], None, id="no-place"),
        pytest.param("~", [4, 5], None, id="nonsense"),
    ],
)
def test_places_of_readers(cursor: str, expected: list[int], lost: int | None) -> None:
    """Four entries were restored, and one of them was dropped for the sixth."""
    journal = RequestJournal(5, "second")
    journal.restore([journal_entry(number) for number in range(4)])
    journal.extend([journal_entry(number) for number in (4, 5)])
    page = journal.page_after(cursor, 2)
    assert [int(item.request_id[2:]) for item in page.entries] == expected
    assert page.lost == lost


def test_what_is_shown_of_a_request() -> None:
    session = session_digest("somebody@example.com")
    (row,) = render_entries([journal_entry(session=session, key="team")], "g1")
    shown = orjson.dumps(rows_json(row))
    assert msgspec.json.decode(shown, type=EndedRequest) == row
    tree = orjson.loads(shown)
    assert tree["id"] == "r-1"
    assert tree["worker"] == "mac-1"
    assert tree["endpoint"] == "http://127.0.0.1:1"
    assert tree["tokens"] == {"prompt": 7, "cached": 3, "output": 11}
    assert tree["apiKey"] == "team"
    assert (tree["latencyMs"], tree["firstTokenMs"]) == (2000.0, 500.0)
    # Equal at every gateway, and it reveals nothing of the name.
    assert tree["session"] == session_digest("somebody@example.com")
    assert "example" not in json.dumps(tree)


async def test_real_requests(gateway: Running) -> None:
    await gateway.serve(dies_at_once, chat)
    headers = {"x-request-id": "mine", "x-session-id": "s"}
    async with gateway.post(json={"model": "m", "stream": True}, headers=headers) as response:
        await response.read()
    async with gateway.post(json={"model": "nobody"}) as response:
        assert response.status == 404
    await until(lambda: len(gateway.gateway.recorder.journal) == 2, what="both to be written down")
    unknown, served = gateway.gateway.recorder.journal.last(2)
    assert (unknown.model, unknown.outcome, unknown.status) == ("nobody", "refused", 404)
    assert (unknown.served_by, list(unknown.attempts)) == (None, [])
    assert (served.request_id, served.path, served.outcome) == ("mine", CHAT, "ok")
    assert served.session == session_digest("s")
    assert served.is_streamed
    assert served.served_by is not None
    assert served.served_by.replica == "m-1"
    assert [(attempt.endpoint.replica, attempt.outcome) for attempt in served.attempts] == [
        ("m-0", "broken"),
        ("m-1", "answered"),
    ]
    assert served.strategy == "Scored"
    assert 0 < served.first_s <= served.whole_s


async def test_the_file_has_every_request(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    limits = GatewayLimits(drain_timeout_s=0.0, journal_size=1, journal_file=path)
    async with running_gateway(limits=limits) as gateway:
        await gateway.serve(chat)
        for _ in range(3):
            async with gateway.post(json={"model": "m"}) as response:
                await response.read()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["replica"] for line in lines] == ["m-0"] * 3
    assert len({line["id"] for line in lines}) == 3
    assert path.stat().st_mode & 0o077 == 0


def test_the_file_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    file = JournalWriter(path, SystemClock(), gateway="g", file_bytes=1)
    for number in range(8):
        file.write([journal_entry(number)])
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "requests.jsonl",
        *(f"requests.jsonl.{number}" for number in range(1, 5)),
    ]
    assert json.loads(path.read_text())["id"] == "r-7"
    assert json.loads((tmp_path / "requests.jsonl.4").read_text())["id"] == "r-3"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full, on Linux")
def test_a_full_disk_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    file = JournalWriter(Path("/dev/full"), SystemClock(), gateway="g")
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            file.write([journal_entry(number)])
    # Another test's file may be on a hanging disk and log now.
    ours = [record for record in caplog.records if vars(record)["path"] == "/dev/full"]
    assert [record.message for record in ours] == [
        "cannot write the journal; requests are served without it"
    ]
    assert file.lost == 3


RESPONSE = (
    b'{"input_tokens":3,"input_tokens_details":{"cached_tokens":1,"cache_write_tokens":0},'
    b'"output_tokens":5,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":8}'
)


async def test_a_disk_that_hangs_costs_lines_and_no_request(tmp_path: Path) -> None:
    """A pipe without a reader blocks its opener, like a dead network disk."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    line = journal_entry()
    file = JournalWriter(path, SystemClock(), gateway="g")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(file.run())
        await asyncio.sleep(0)
        for _ in range(6):
            file.extend([line] * 10_000)
        assert file.lost == 10_000
        task.cancel()
    # Releases the thread.
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


requests = st.lists(st.tuples(st.integers(0, 3 * 24 * 3600), st.booleans()), max_size=30)


@settings(max_examples=samples(40))
@given(requests)
def test_sums_are_those_of_the_last_day(ends: list[tuple[int, bool]]) -> None:
    """The sums are those of the steps that are kept, whatever came when."""
    series = RateSeries()
    for time_s, is_ok in ends:
        outcome = "ok" if is_ok else "failed"
        series.add(journal_entry(outcome=outcome, time_s=float(time_s), whole_s=0.0))
    now_s = max((time_s for time_s, _ in ends), default=0)
    for duration_s in (60, 3600, 24 * 3600):
        steps = min(STEPS - 1, duration_s // STEP_S)
        first = (now_s // STEP_S - steps) * STEP_S
        expected = [is_ok for time_s, is_ok in ends if time_s >= first]
        interval_sums = series.over(now_s, duration_s)
        assert (interval_sums.requests, interval_sums.errors) == (
            len(expected),
            expected.count(False),
        )
        assert interval_sums.output_tokens == 11 * len(expected)
        points = list(series.points(now_s, duration_s, 100))
        assert len(points) <= 100
        # The current step is not drawn.
        drawn = [one for one in ends if first <= one[0] < now_s // STEP_S * STEP_S]
        assert sum(sums.requests for _, sums in points) == len(drawn)


@settings(max_examples=samples(40))
@given(requests, st.integers(0, 3 * 24 * 3600), requests)
def test_a_clock_that_was_set_back(
    before: list[tuple[int, bool]], now_s: int, after: list[tuple[int, bool]]
) -> None:
    """Steps of the time that comes again are counted once, and none of a far future is."""
    series = RateSeries()
    for time_s, _ in before:
        series.add(journal_entry(time_s=float(time_s), whole_s=0.0))
    series.set_back(now_s)
    later = [(time_s, is_ok) for time_s, is_ok in after if time_s >= now_s]
    for time_s, _ in later:
        series.add(journal_entry(time_s=float(time_s), whole_s=0.0))
    latest_s = max([now_s, *(time_s for time_s, _ in later)])
    newest_before_s = max((time_s for time_s, _ in before), default=0)
    is_set_back = newest_before_s // STEP_S - now_s // STEP_S > 6
    kept = [
        time_s
        for time_s, _ in before
        # What was overwritten before the clock was set back stays lost.
        if time_s // STEP_S > newest_before_s // STEP_S - STEPS
        and (not is_set_back or time_s // STEP_S <= now_s // STEP_S)
    ]
    if not is_set_back:
        latest_s = max(latest_s, newest_before_s)
    first_s = (latest_s // STEP_S - STEPS + 1) * STEP_S
    expected = sum(time_s >= first_s for time_s in (*kept, *(time_s for time_s, _ in later)))
    assert series.over(latest_s, 24 * 3600).requests == expected


def test_rates_are_per_second_and_means_are_of_what_there_was() -> None:
    series = RateSeries()
    for number in range(20):
        series.add(journal_entry(number, time_s=1000.0, whole_s=2.0))
    ((_, sums),) = series.points(1010.0, 10, 1)
    values = {name: read(sums) for name, (_, read) in SERIES_METRICS.items()}
    assert values["rps"] == 2.0
    assert values["tokens_per_second"] == 22.0
    assert (values["latency"], values["first_token"]) == (2000.0, 500.0)
    assert values["error_rate"] == 0.0
    ((_, nothing),) = series.points(2000.0, 10, 1)
    assert SERIES_METRICS["latency"][1](nothing) is None
    assert series.fastest(1010.0) == 22.0
    assert series.fastest(1010.0 + 25 * 3600) == 0.0


def test_before_the_start_nothing_was_measured() -> None:
    ((at_s, sums),) = RateSeries().points(1010.0, 10, 1)
    assert (at_s, sums.seconds) == (1000, 10)
    assert sums.since(at_s, 1010.0) is None
    assert sums.since(at_s, 1000.0) is sums
    half = sums.since(at_s, 1005.0)
    assert half is not None
    assert (half.seconds, SERIES_METRICS["rps"][1](half)) == (5, 0.0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            b'{"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8,'
            b'"prompt_tokens_details":{"cached_tokens":2}}}',
            (3, 2, 5),
        ),
        (b'{"usage":{"prompt_tokens":3,"total_tokens":3}}', (3, 0, 0)),
        (b'{"id":"resp_1","usage":' + RESPONSE + b"}", (3, 1, 5)),
        (
            b'event: response.output_text.delta\ndata: {"delta":"x"}\n\nevent: response.completed\n'
            b'data: {"response":{"usage":' + RESPONSE + b',"metadata":{"a":"b"}}}\n\n',
            (3, 1, 5),
        ),
        # The response repeats the client's tools, which are not usage.
        (
            b'{"id":"resp_1","usage":' + RESPONSE + b',"tools":[{"usage":{"prompt_tokens":0,'
            b'"completion_tokens":0,"total_tokens":0}}]}',
            (3, 1, 5),
        ),
        (b'event: response.failed\ndata: {"response":{"usage":null}}\n\n', None),
        (b"event: response.failed\ndata: {", None),
        (b'{"usage": {"completion_tokens": 5, "prompt_tokens" : 3}}', (3, 0, 5)),
        (b'{"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":9}"}]}', None),
        (b'{"usage":null}', None),
        (b"", None),
    ],
)
def test_tokens_of_an_answer(body: bytes, expected: tuple[int, int, int] | None) -> None:
    assert parse_usage(body) == expected
