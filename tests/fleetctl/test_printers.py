"""Tables of `fleetctl get`, from objects alone."""

from datetime import UTC, datetime

import pytest

from fleetctl import printers
from schemas.meta import Condition, ObjectMeta, Truth
from schemas.route import (
    Backend,
    HeaderMatch,
    ModelRoute,
    ModelRouteSpec,
    ModelRouteStatus,
    RouteRule,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULE = RouteRule(
    headers=(HeaderMatch(name="x-team", value="research"), HeaderMatch(name="x-beta")),
    backends=(Backend(deployment="next", weight=2), Backend(deployment="big")),
)
REFUSED = Condition(
    type="Accepted",
    status=Truth.FALSE,
    reason="BackendNotFound",
    message="there is no ModelDeployment big",
    last_transition_time=NOW,
    observed_generation=1,
)


def route(name: str, status: ModelRouteStatus | None = None, **more: object) -> ModelRoute:
    fields = {"model": name, "backends": (Backend(deployment="qwen", weight=9),), **more}
    meta = ObjectMeta(name=name, creation_timestamp=NOW)
    return ModelRoute(metadata=meta, spec=ModelRouteSpec.model_validate(fields), status=status)


@pytest.mark.parametrize(
    ("is_wide", "rows"),
    [
        (
            False,
            [
                "NAME    MODEL    ACCEPTED    BACKENDS    FALLBACKS    AGE",
                "chat    chat     False       qwen=9      small,tiny   0s",
                "plain   plain    Unknown     qwen=9                   0s",
            ],
        ),
        (
            True,
            [
                "NAME    MODEL    ACCEPTED    BACKENDS    FALLBACKS    AGE    RULES"
                "                                     WHY",
                "chat    chat     False       qwen=9      small,tiny   0s     "
                "x-team=research,x-beta -> next=2,big=1    "
                "BackendNotFound: there is no ModelDeployment big",
                "plain   plain    Unknown     qwen=9                   0s",
            ],
        ),
    ],
    ids=["narrow", "wide"],
)
def test_a_route_shows_where_requests_may_go(is_wide: bool, rows: list[str]) -> None:
    status = ModelRouteStatus(conditions=(REFUSED,))
    full = route("chat", status, rules=(RULE,), fallbacks=("small", "tiny"))
    shown = printers.table([full, route("plain")], printers.Moment(now=NOW), is_wide=is_wide)
    assert [line.split() for line in shown.splitlines()] == [row.split() for row in rows]
