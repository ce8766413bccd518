"""Label and field selectors, as in kubectl."""

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import selectors
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
        ("team in (a, b)", True),
        ("team in (b,c),team", False),
        ("team notin (b,c), team in (a)", True),
        ("team notin (a)", False),
        ("site notin (a)", True),
        ("site in ()", False),
    ],
)
def test_selector(text: str, matches: bool) -> None:
    node = Node(metadata=ObjectMeta(name="mac-1", labels={"team": "a"}))
    tree = {"kind": "Node", "metadata": {"name": "mac-1", "labels": {"team": "a"}}}
    assert bool(selectors.select([node], selectors.parse_labels(text))) == matches
    assert bool(selectors.select([tree], selectors.parse_labels(text))) == matches


@pytest.mark.parametrize(
    "text", ["a b", "=a", "!a=b", "a>1", "a in b", "a in (b", "!a in (b)", "a=b=c"]
)
def test_invalid_selectors_are_errors(text: str) -> None:
    with pytest.raises(FleetctlError, match="key=value, key!=value, key in"):
        selectors.parse_labels(text)
