"""`fleetctl simulate --week`: what a policy of sleep saves in a recorded week, and its refusals."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fleetctl.verbs.simulate import simulate

EXAMPLE = Path(__file__).parents[3] / "examples" / "simulate" / "week.yaml"
WEEK = """
macs:
- {name: studio, models: [chat], awakeWatts: 40, asleepWatts: 0}
power: POWER
wakeTime: 30s
requestTime: 60s
requests:
- {hour: 10, model: chat, count: 60}
- {hour: 178, model: chat, count: 60}
- {hour: 200, model: chat, count: 1}
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(simulate, ["--week", *words])


def policies(path: Path) -> list[dict[str, float]]:
    result = run(str(path), "-o", "json")
    assert result.exit_code == 0, result.output
    trees: list[dict[str, float]] = json.loads(result.output)["policies"]
    return trees


def test_the_example_saves_two_fifths_of_the_awake_hours_and_no_forecast_hour_waits() -> None:
    always, idle = policies(EXAMPLE)
    assert always["awakeHours"] == 3 * 168
    assert idle["awakeHours"] <= 0.6 * always["awakeHours"]
    assert idle["kilowattHours"] < 0.6 * always["kilowattHours"]
    forecast = "p95WaitSecondsOfForecastHours"
    assert idle[forecast] == always[forecast] == 0
    assert "saves" in run(str(EXAMPLE)).output


@pytest.mark.parametrize(("power", "hours", "wakes", "waited"), [
    # Hour 178 is forecast by hour 10, so it costs its lead of 5 minutes and the idle time; hour 200 is not.
    ("{mode: SleepWhenIdle, idleTime: 6m}", 1.4, 2, 1),
    ("{mode: Schedule, idleTime: 6m, awake: [{start: '10:00', end: '12:00'}]}", 14.1, 8, 1),
    ("{mode: AlwaysOn}", 168, 0, 0),
])  # fmt: skip
def test_a_week(tmp_path: Path, power: str, hours: float, wakes: int, waited: int) -> None:
    path = tmp_path / "week.yaml"
    path.write_text(WEEK.replace("POWER", power))
    always, found = policies(path)
    assert always["kilowattHours"] == 6.72
    assert found["awakeHours"] == pytest.approx(hours, abs=0.3)
    assert (found["wakes"], found["waited"]) == (wakes, waited)
    assert found["requests"] == 61


@pytest.mark.parametrize(("words", "before", "after", "problem"), [
    ((), "model: chat, count: 1}", "model: other, count: 1}", "no model of macs"),
    ((), "POWER", "{mode: Schedule}", "needs awake"),
    ((), "hour: 200", "hour: 20000", "hour"),
    (("--fleet", "fleet.yaml"), "POWER", "{mode: AlwaysOn}", "neither -f nor --fleet"),
])  # fmt: skip
def test_refusals(
    tmp_path: Path, words: tuple[str, ...], before: str, after: str, problem: str
) -> None:
    path = tmp_path / "week.yaml"
    text = WEEK.replace(before, after).replace("POWER", "{mode: SleepWhenIdle}")
    path.write_text(text)
    result = run(str(path), *words)
    assert result.exit_code != 0
    assert problem in f"{result.output}{result.exception}"
