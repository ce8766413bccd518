"""The file of the history: what is written twice counts once, percentiles are right, and limits hold."""

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import pairwise
from math import nan
from pathlib import Path

import pytest
from typing_extensions import override

from dashboard.history.database import (
    DAMAGED,
    FILE,
    DamagedError,
    HistoryError,
    HistoryFile,
    HistoryLimits,
    set_aside,
)
from dashboard.history.queries import HistoryReader, Point, RequestQuery, SeriesQuery, align
from dashboard.history.recorder import ClockWatch
from dashboard.history.records import (
    COARSE_S,
    FINE_S,
    FIRST_TOKEN_S,
    Batch,
    KeyRevision,
    RequestSums,
    Sample,
)
from dashboard.traffic import KnownTimes
from machinery.clock import SystemClock
from schemas.wire.requests import EndedRequest, RequestTokens
from tests.support.clock import FakeClock

NOW_S = 1_800_000_000
DAY_S = 24 * 3600


def ended(number: int, at_s: float = NOW_S - 5, **fields: object) -> EndedRequest:
    defaults: dict[str, object] = {
        "outcome": "ok",
        "model": "m",
        "deployment": "m",
        "worker": "mac-1",
        "tokens": RequestTokens(prompt=10, output=20),
    }
    time = datetime.fromtimestamp(at_s, tz=UTC)
    return EndedRequest(time=time, id=f"r-{number}", gateway="g", **{**defaults, **fields})  # type: ignore[arg-type]


def fleet_sample(at_s: int, tier_s: int = FINE_S) -> Sample:
    return Sample(tier_s=tier_s, at_s=at_s, kind="fleet", values={"": (1.0, 0.0, 0.0, 0.0)})


@pytest.fixture
def file(tmp_path: Path) -> Iterator[HistoryFile]:
    with closing(HistoryFile(tmp_path, HistoryLimits())) as history_file:
        yield history_file


async def read(folder: Path, name: str, *metrics: str, **more: int) -> dict[str, list[Point]]:
    values = {"begin_s": NOW_S - 60, "end_s": NOW_S, "step_s": 60, "tier_s": FINE_S, **more}
    query = SeriesQuery(
        kind=name.partition("/")[0], name=name.partition("/")[2], metrics=metrics, **values
    )
    return await HistoryReader(folder, SystemClock()).series(query)


async def test_a_request_that_is_written_twice_counts_once(
    tmp_path: Path, file: HistoryFile
) -> None:
    first = [ended(number) for number in range(10)]
    file.write(
        Batch(at_s=NOW_S, samples=[fleet_sample(NOW_S - 10)], requests=first, cursors={"g": "9"})
    )
    file.write(Batch(at_s=NOW_S, requests=[*first, ended(10)], cursors={"g": "10"}))
    file.close()
    # As after kill -9: another process opens the file.
    again = HistoryFile(tmp_path, HistoryLimits())
    restored = again.restore(NOW_S)
    assert {request.id for request in restored.requests} == {f"r-{number}" for number in range(11)}
    assert len(restored.requests) == 11
    assert restored.macs == {"mac-1": (11, 0.0)}
    assert restored.cursors == {"g": "10"}
    assert restored.steps == [(NOW_S - 10, FINE_S)]
    assert sum(sums.totals()[0] for _, _, sums in restored.sums) == 11
    points = await read(tmp_path, "model/m", "requests_per_second", "output_tokens_per_second")
    # Eleven requests within the only ten seconds in which a recorder ran.
    assert points["requests_per_second"][0][1] == pytest.approx(1.1)
    assert points["output_tokens_per_second"][0][1] == pytest.approx(22.0)
    again.close()


async def test_percentiles_over_many_steps_are_those_of_all_requests(
    tmp_path: Path, file: HistoryFile
) -> None:
    dice = random.Random(7)
    times_ms = [dice.lognormvariate(5.0, 1.2) for _ in range(4000)]
    steps = [NOW_S - 60 * (1 + number % 30) for number in range(4000)]
    for at_s in sorted(set(steps)):
        few = [
            ended(number, at_s - 0.001, first_token_ms=ms, latency_ms=1.0, streamed=True)
            for number, (ms, step) in enumerate(zip(times_ms, steps, strict=True))
            if step == at_s
        ]
        file.write(Batch(samples=[fleet_sample(at_s - 60, COARSE_S)], requests=few))
    found = await read(
        tmp_path,
        "fleet",
        *("first_token_p50", "first_token_p95", "first_token_p99"),
        begin_s=NOW_S - 3600,
        step_s=3600,
        tier_s=COARSE_S,
    )
    bounds = (0.0, *FIRST_TOKEN_S)
    for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
        exact_s = sorted(times_ms)[int(len(times_ms) * share)] / 1000
        low, high = next((a, b) for a, b in pairwise(bounds) if a < exact_s <= b)
        value = found[f"first_token_{name}"][0][1]
        assert value is not None
        assert low * 1000 <= value <= high * 1000


async def test_what_was_not_measured_is_null(tmp_path: Path, file: HistoryFile) -> None:
    for at_s, cpu in ((NOW_S - 60, 0.25), (NOW_S - 40, nan), (NOW_S - 10, 0.75)):
        values = {"mac-1": (cpu, *[nan] * 15), "mac-2": (0.5, *[nan] * 15)}
        file.write(Batch(samples=[Sample(tier_s=FINE_S, at_s=at_s, kind="node", values=values)]))
    found = await read(tmp_path, "node/mac-1", "cpu_ratio", "gpu_ratio", step_s=10)
    assert [mean for _, mean, _ in found["cpu_ratio"]] == [0.25, None, None, None, None, 0.75]
    assert set(found["gpu_ratio"]) == {(None, None, None)}
    found = await read(tmp_path, "node/mac-1", "cpu_ratio")
    assert found["cpu_ratio"] == [(0.25, 0.5, 0.75)]
    assert (await read(tmp_path, "node/none", "cpu_ratio"))["cpu_ratio"] == [(None, None, None)]
    # No recorder ran: there were not zero requests, they are unknown.
    assert (await read(tmp_path, "fleet", "requests_per_second"))["requests_per_second"] == [
        (None, None, None)
    ]


async def test_requests_are_found_by_each_filter(tmp_path: Path, file: HistoryFile) -> None:
    requests = [
        ended(1, model="a", api_key="k", latency_ms=5000.0),
        ended(2, outcome="failed", worker="mac-2"),
        ended(3, NOW_S - 3600),
    ]
    file.write(Batch(requests=requests))
    reader = HistoryReader(tmp_path, SystemClock())

    async def ids(**filters: object) -> list[str]:
        limits = {"begin_s": NOW_S - 7200.0, "end_s": NOW_S + 1.0, "limit": 10, **filters}
        return [request.id for request in await reader.requests(RequestQuery(**limits))]  # type: ignore[arg-type]

    assert await ids() == ["r-1", "r-2", "r-3"]
    assert await ids(limit=1) == ["r-1"]
    assert await ids(model="a") == ["r-1"]
    assert await ids(node="mac-2") == ["r-2"]
    assert await ids(key="k") == ["r-1"]
    assert await ids(id="r-3") == ["r-3"]
    assert await ids(outcomes=frozenset({"failed"})) == ["r-2"]
    assert await ids(least_ms=4000.0) == ["r-1"]
    assert await ids(begin_s=NOW_S - 60.0) == ["r-1", "r-2"]
    assert (await reader.requests(RequestQuery(begin_s=0, end_s=NOW_S + 9, limit=9)))[
        2
    ] == requests[2]


def test_old_rows_are_removed_and_current_revisions_stay(file: HistoryFile) -> None:
    old_s = NOW_S - DAY_S - 120
    revisions = [
        KeyRevision(key="a", at_s=old_s - 60, revision=1, value=b"1"),
        KeyRevision(key="a", at_s=old_s, revision=2, value=b"2"),
        KeyRevision(key="b", at_s=old_s - 60, revision=3, value=b"3"),
        KeyRevision(key="b", at_s=old_s, revision=4, value=None),
    ]
    samples = [
        fleet_sample(at_s // COARSE_S * COARSE_S, COARSE_S) for at_s in (old_s, NOW_S - 5400)
    ]
    samples += [fleet_sample(at_s) for at_s in (NOW_S - 7200, NOW_S - 60)]
    file.write(Batch(samples=samples, requests=[ended(1, old_s), ended(2)], revisions=revisions))
    # A clock that was set back by a day and more: nothing is removed while it is not trusted.
    file.prune(NOW_S, by_age=False)
    assert len(file.restore(NOW_S - DAY_S).requests) == 2
    file.prune(NOW_S, by_age=True)
    restored = file.restore(NOW_S - DAY_S)
    assert [request.id for request in restored.requests] == ["r-2"]
    assert restored.revisions == {"a": 2}
    assert [at_s for at_s, _ in file.restore(NOW_S).steps] == [NOW_S - 5400, NOW_S - 60, NOW_S - 10]
    # Rows of a time in which the clock was ahead.
    file.prune(NOW_S - 2 * DAY_S, by_age=True)
    assert file.restore(NOW_S).requests == []


def test_the_size_is_limited_by_removing_the_oldest(tmp_path: Path) -> None:
    limit = 1 << 20
    file = HistoryFile(tmp_path, HistoryLimits(file_bytes=limit))
    dice = random.Random(3)
    for hour in range(20, 0, -1):
        at_s = NOW_S - hour * 3600
        few = [
            ended(number * 100 + hour, at_s + number, session=dice.randbytes(100).hex())
            for number in range(600)
        ]
        file.write(Batch(requests=few))
    assert file.used_bytes > limit
    file.prune(NOW_S, by_age=False)
    assert file.used_bytes <= limit
    requests = file.restore(NOW_S).requests
    assert requests
    assert requests[-1].time_s > NOW_S - 3600
    file.close()
    assert (tmp_path / FILE).stat().st_size <= 2 * limit


def test_names_of_macs_that_are_long_gone_give_their_place_away(file: HistoryFile) -> None:
    for number in range(100):
        at_s = NOW_S - (100 - number) * DAY_S // COARSE_S * COARSE_S
        sample = Sample(tier_s=COARSE_S, at_s=at_s, kind="node", values={f"m{number}": (0.5,) * 16})
        file.write(Batch(samples=[sample]))
        file.prune(at_s + 60, by_age=True)
    with sqlite3.connect(file._db.execute("PRAGMA database_list").fetchone()[2]) as db:
        assert db.execute("SELECT max(slot) FROM subjects").fetchone()[0] < 3
    db.close()


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database" * 1000)
    with pytest.raises(DamagedError):
        HistoryFile(tmp_path, HistoryLimits())
    set_aside(tmp_path)
    HistoryFile(tmp_path, HistoryLimits()).close()
    assert (tmp_path / DAMAGED).exists()


def test_a_folder_has_one_writer(tmp_path: Path, file: HistoryFile) -> None:
    assert file.used_bytes
    with pytest.raises(HistoryError, match="another fleet-dashboard uses"):
        HistoryFile(tmp_path, HistoryLimits())


def test_the_fine_tier_is_read_while_it_is_kept() -> None:
    assert align(NOW_S - 600, NOW_S, wanted_s=5, now_s=NOW_S) == (NOW_S - 600, NOW_S, 10, 10)
    begin, end, step, tier = align(NOW_S - DAY_S, NOW_S, wanted_s=240, now_s=NOW_S)
    assert (end - begin, step, tier) == (DAY_S, 240, 60)
    assert align(NOW_S - DAY_S, NOW_S, wanted_s=1, now_s=NOW_S)[2:] == (60, 60)


def test_sums_of_an_older_release_have_fewer_numbers() -> None:
    sums = RequestSums()
    sums.count(ended(1))
    old = RequestSums.unpack(sums.pack()[: 4 * 8])
    assert old.totals() == sums.totals()
    assert old.quantile("latency", 0.5) is None


def test_times_without_a_recorder_are_not_known() -> None:
    known = KnownTimes(1000.0)
    known.restore([(100, 60), (160, 60), (400, 10), (410, 10), (990, 20)])
    assert known.seconds(0, 300) == 120
    assert known.seconds(300, 500) == 20
    assert known.seconds(980, 1010) == 20
    assert known.seconds(2000, 2060) == 60
    assert known.seconds(500, 900) == 0


async def test_a_clock_that_jumps_is_not_trusted_for_an_hour() -> None:
    clock, jumped_s = FakeClock(), [0.0]

    class JumpingClock(FakeClock):
        @override
        def now(self) -> datetime:
            return datetime.fromtimestamp(NOW_S + clock.elapsed() + jumped_s[0], tz=UTC)

        @override
        def elapsed(self) -> float:
            return clock.elapsed()

    watch = ClockWatch(JumpingClock())
    assert not watch.is_trusted()
    await clock.advance(3600)
    assert watch.is_trusted()
    # A Mac that slept: both clocks went on.
    clock.doze(7200)
    assert watch.is_trusted()
    jumped_s[0] = -86_400.0
    assert not watch.is_trusted()
    await clock.advance(3599)
    assert not watch.is_trusted()
    await clock.advance(1)
    assert watch.is_trusted()
