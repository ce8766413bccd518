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


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("metadata.name=a", True),
        ("metadata.name!=a", False),
        ("spec.replicas==2,spec.on=true", True),
        ("spec.on=True", False),
        ("status.nothing=", True),
        ("status.nothing!=x", True),
        ("spec.replicas.deeper=1", False),
        ("spec.path=/a=b", True),
    ],
)
def test_field_selector(text: str, matches: bool) -> None:
    tree = {"metadata": {"name": "a"}, "spec": {"replicas": 2, "on": True, "path": "/a=b"}}
    assert all(part.holds(tree) for part in selectors.parse_fields(text)) == matches


@pytest.mark.parametrize("text", ["a", "name=a", "spec=a", "spec.a", "spec.a>1", "spec..a=1", "=b"])
def test_invalid_field_selectors_are_errors(text: str) -> None:
    with pytest.raises(FleetctlError, match="write FIELD=value or FIELD!=value"):
        selectors.parse_fields(text)


def test_a_field_with_several_values_is_an_error() -> None:
    (part,) = selectors.parse_fields("spec.names=a")
    with pytest.raises(FleetctlError, match=r"spec\.names holds several values"):
        part.holds({"spec": {"names": ["a"]}})
