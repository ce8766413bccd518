"""Energy: power is divided by tokens, gaps and unknown power are no zeros, and reasons are given."""

import math
from contextlib import closing
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from dashboard.api.history_routes import HistoryRoutes
from dashboard.energy import NO_POWER, NO_REQUEST, ShareCounter, divide_power, energy_row
from dashboard.history.database import HistoryFile, HistoryLimits
from dashboard.history.queries import HistoryReader, Point
from dashboard.history.records import COLUMNS, FINE_S, Batch, Sample
from dashboard.traffic import Traffic
from machinery.clock import SystemClock
from schemas.wire.errors import RefusedError
from tests.support.dashboards import ended

UNKNOWN = math.nan


def known(*values: float | None) -> list[Point]:
    return [(value, value, value) for value in values]


def test_the_power_of_a_mac_is_divided_by_tokens() -> None:
    counts = {("a", "one"): (2, 300), ("a", "two"): (1, 100), ("b", "one"): (1, 50)}
    found = divide_power(counts, {"a": 40.0, "b": 10.0}, 10)
    assert found["one"] == pytest.approx((40.0, 0.3, 35.0))
    assert found["two"] == pytest.approx((10.0, 0.1, 10.0))


def test_unknown_power_takes_its_requests_along() -> None:
    counts = {("a", "one"): (2, 300), ("b", "one"): (5, 500), ("b", "two"): (1, 10)}
    found = divide_power(counts, {"a": 30.0, "b": UNKNOWN}, 10)
    assert found == {"one": (30.0, 0.2, 30.0)}
    assert divide_power({("a", "one"): (1, 0)}, {"a": 30.0}, 10) == {}


def test_a_row_counts_only_time_in_which_everything_is_known() -> None:
    row = energy_row("model/m", known(20, None, 40), known(1, 1, 1), known(100, 100, 300), 10)
    assert (row["joules"], row["knownSeconds"], row["requests"]) == (600, 20, 20)
    assert (row["joulesPerRequest"], row["joulesPer1000Tokens"]) == (30, 150)
    assert row["reason"] is None


@pytest.mark.parametrize(
    ("watts", "requests", "reason"),
    [((None, None), (1, 1), NO_POWER), ((20, 20), (0, 0), NO_REQUEST)],
)
def test_what_cannot_be_known_is_null_with_its_reason(
    watts: tuple[float | None, ...], requests: tuple[float, ...], reason: str
) -> None:
    row = energy_row("model/m", known(*watts), known(*requests), known(*requests), 10)
    assert (row["joulesPerRequest"], row["joulesPer1000Tokens"], row["reason"]) == (
        None,
        None,
        reason,
    )


def test_requests_are_counted_once_and_for_their_mac() -> None:
    counter = ShareCounter()
    counter.count([ended(1), ended(2)])
    assert counter.take() == {("mac-1", "qwen"): (2, 202)}
    assert counter.take() == {}


def test_the_route_reads_what_the_recorder_measured(tmp_path: Path) -> None:
    """Forty watts for a minute are 2,400 joules: of 6 requests, and of 600 tokens."""
    clock, columns = SystemClock(), COLUMNS["node"]
    now_s = int(clock.now().timestamp()) // FINE_S * FINE_S
    measured = {"power_watts": 40.0, "requests_per_second": 0.1, "output_tokens_per_second": 10.0}
    known = tuple(measured.get(name, math.nan) for name in columns)
    unknown = tuple(
        math.nan if name == "power_watts" else measured.get(name, 0.0) for name in columns
    )
    with closing(HistoryFile(tmp_path, HistoryLimits())) as file:
        for at_s in range(now_s - 60, now_s, FINE_S):
            values = {"mac-1": known, "mac-2": unknown}
            sample = Sample(tier_s=FINE_S, at_s=at_s, kind="node", values=values)
            file.write(Batch(at_s=at_s, samples=[sample]))
    app = FastAPI()
    HistoryRoutes(HistoryReader(tmp_path, clock), Traffic(), clock).add_to(app.router)
    client = TestClient(app)
    answer = client.get("/api/v1/energy?subject=node/mac-1,node/mac-2&from=10m").json()
    first, second = answer["energy"]
    assert first == {
        "subject": "node/mac-1",
        "joules": pytest.approx(2400, rel=0.01),
        "knownSeconds": 60,
        "requests": 6,
        "outputTokens": pytest.approx(600, abs=1),
        "joulesPerRequest": pytest.approx(400, rel=0.01),
        "joulesPer1000Tokens": pytest.approx(4000, rel=0.01),
        "reason": None,
    }
    assert (second["subject"], second["joules"], second["reason"]) == ("node/mac-2", None, NO_POWER)
    with pytest.raises(RefusedError, match="is not node/NAME or model/NAME"):
        client.get("/api/v1/energy?subject=pool/a")
