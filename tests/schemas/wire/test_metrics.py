"""Names of metrics that cross processes."""

import re

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


def test_outcomes_are_in_the_order_of_the_exposition() -> None:
    assert metrics.VERSION_OUTCOMES == ("ok", "error", "refused", "client_gone")


def test_errors_are_outcomes() -> None:
    assert set(metrics.REQUEST_OUTCOMES) > metrics.REQUEST_ERRORS
