"""How fast the engine has been, and what it promises to whom it sends away."""

import pytest

from engine.gauges import Gauges
from engine.metrics import CompletionRate, Throughput, retry_after_s


@pytest.mark.parametrize(
    ("queued", "ended", "within_s", "wanted"),
    [
        pytest.param(1, 100, 10.0, 1, id="gone in a moment"),
        pytest.param(65, 130, 60.0, 30, id="half of what ended within a minute"),
        pytest.param(65, 1, 60.0, 60, id="never more than a minute"),
        pytest.param(2, 0, 7.5, 15, id="none ended yet: as long again for each"),
        pytest.param(65, 0, 0.0, 1, id="everything came at this moment"),
    ],
)
def test_retry_after(queued: int, ended: int, within_s: float, wanted: int) -> None:
    assert retry_after_s(queued=queued, ended=ended, within_s=within_s) == wanted


def test_the_pace_is_that_of_the_last_minute_of_work() -> None:
    ends = CompletionRate()
    ends.begin(1000.0)
    for second in range(1, 11):
        ends.add(1000.0 + second)
    assert ends.retry_after_s(queued=5, now_s=1010.0) == 5
    ends.add(1060.0)
    assert ends.retry_after_s(queued=1, now_s=1071.0) == 60  # one in the last minute
    ends.begin(2000.0)  # after a pause, what was before is of no account
    assert ends.retry_after_s(queued=3, now_s=2002.0) == 6


def test_more_ends_than_are_kept() -> None:
    ends = CompletionRate()
    ends.begin(0.0)
    for millisecond in range(5000):
        ends.add(millisecond / 1000)
    assert ends.retry_after_s(queued=10_000, now_s=5.0) == 10


def test_speed_is_of_the_time_at_work() -> None:
    gauges = Gauges()
    speed = Throughput(gauges)
    assert (speed.prefill(), speed.decode()) == (0.0, 0.0)
    speed.look(0.0)
    for second in range(1, 200):
        gauges.prefill_tokens += 100
        gauges.prefill_seconds += 0.5
        gauges.decode_tokens += 30 if second > 120 else 10
        gauges.decode_seconds += 0.5
        speed.look(float(second))
        speed.look(second + 0.01)  # too soon to be kept
    assert speed.prefill() == pytest.approx(200)
    assert speed.decode() == pytest.approx(60)
    speed.look(300.0)
    assert speed.decode() == 0.0
