"""Throughput and retry-after: the figures of the last minute."""

import pytest

from engine.gauges import Gauges
from engine.lifecycle import EngineState
from engine.metrics import CompletionRate, EngineMetrics, MetricSources, Throughput, retry_after_s
from schemas.wire import metrics as wire_metrics


@pytest.mark.parametrize(
    ("queued", "ended", "within_s", "expected"),
    [
        pytest.param(1, 100, 10.0, 1, id="at-least-a-second"),
        pytest.param(65, 130, 60.0, 30, id="half-a-minute"),
        pytest.param(65, 1, 60.0, 60, id="at-most-a-minute"),
        pytest.param(2, 0, 7.5, 15, id="none-ended-yet"),
        pytest.param(65, 0, 0.0, 1, id="no-time-passed"),
    ],
)
def test_retry_after(queued: int, ended: int, within_s: float, expected: int) -> None:
    assert retry_after_s(queued=queued, ended=ended, within_s=within_s) == expected


def test_only_the_last_minute_of_work_counts() -> None:
    rate = CompletionRate()
    rate.begin(1000.0)
    for second in range(1, 11):
        rate.add(1000.0 + second)
    assert rate.retry_after_s(queued=5, now_s=1010.0) == 5
    rate.add(1060.0)
    assert rate.retry_after_s(queued=1, now_s=1071.0) == 60  # one in the last minute
    rate.begin(2000.0)  # what ended before a pause does not count
    assert rate.retry_after_s(queued=3, now_s=2002.0) == 6


def test_more_requests_end_than_are_kept() -> None:
    rate = CompletionRate()
    rate.begin(0.0)
    for millisecond in range(5000):
        rate.add(millisecond / 1000)
    assert rate.retry_after_s(queued=10_000, now_s=5.0) == 10


def test_throughput_is_per_second_of_work() -> None:
    gauges = Gauges()
    throughput = Throughput(gauges)
    assert (throughput.prefill(), throughput.decode()) == (0.0, 0.0)
    throughput.sample(0.0)
    for second in range(1, 200):
        gauges.prefill_tokens += 100
        gauges.prefill_seconds += 0.5
        gauges.decode_tokens += 30 if second > 120 else 10
        gauges.decode_seconds += 0.5
        throughput.sample(float(second))
        throughput.sample(second + 0.01)  # too soon for another sample
    assert throughput.prefill() == pytest.approx(200)
    assert throughput.decode() == pytest.approx(60)
    throughput.sample(300.0)
    assert throughput.decode() == 0.0


def test_the_metrics_that_agents_read_are_exported() -> None:
    gauges = Gauges()
    sources = MetricSources(
        gauges=gauges,
        speed=Throughput(gauges),
        state=lambda: EngineState.READY,
        in_flight=lambda: 0,
        queued=lambda: 0,
    )
    lines = EngineMetrics(sources).text().splitlines()
    exported = {line.split()[0] for line in lines if not line.startswith("#")}
    read = {
        value
        for name, value in vars(wire_metrics).items()
        if name.startswith("ENGINE_") and name != "ENGINE_PREFIX"
    }
    assert len(read) == 9
    assert read <= exported
