"""Names of metrics that cross processes."""

import re

import pytest

from schemas.wire import metrics

NAMES = [
    value
    for key, value in vars(metrics).items()
    if key.isupper() and isinstance(value, str) and value.startswith("fleet_")
]


def test_names_are_prometheus_names_and_unique() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert [
        name for name in NAMES if not re.fullmatch(r"fleet_(engine|gateway)_[a-z_0-9]*", name)
    ] == []


# https://github.com/open-telemetry/semantic-conventions-genai: the boundaries of gen_ai.server.time_to_first_token,
# .time_per_output_token and .request.duration, and of gen_ai.client.token.usage as far as a context can be long.
OTEL = {
    "FIRST_TOKEN_BOUNDS_S": (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5), 10.0),
    "PER_TOKEN_BOUNDS_S": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    "REQUEST_BOUNDS_S": tuple(0.01 * 2**number for number in range(14)),
    "TOKEN_COUNT_BOUNDS": tuple(4**number for number in range(11)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTEL)
def test_buckets_include_those_of_opentelemetry(name: str) -> None:
    bounds = getattr(metrics, name)
    assert list(bounds) == sorted(set(bounds))
    assert set(OTEL[name]) <= set(bounds)
