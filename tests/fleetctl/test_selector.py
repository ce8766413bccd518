"""Selectors as kubectl has them."""

import pytest

from fleetctl import selector
from fleetctl.errors import FleetctlError
from schemas.meta import ObjectMeta
from schemas.node import Node


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("team=a", True),
        ("team==a", True),
        ("team = a", True),
        ("team=b", False),
        ("team!=b", True),
        ("team!=a", False),
        ("site!=a", True),
        ("team", True),
        ("site", False),
        ("!site", True),
        ("!team", False),
        ("team=a,site", False),
        ("team=a, fleet/node=mac-1", True),
        ("empty=", False),
    ],
)
def test_selector(text: str, matches: bool) -> None:
    node = Node(metadata=ObjectMeta(name="mac-1", labels={"team": "a"}))
    assert bool(selector.select([node], selector.parse(text))) == matches


@pytest.mark.parametrize("text", ["a b", "=a", "!a=b", "a>1", "a in (b)"])
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(FleetctlError, match="key=value, key!=value, key or !key"):
        selector.parse(text)
