"""Tests of the helpers of the kinds: labels, selectors, derived names, sums."""

import pytest

from schemas.deployment import served_names
from schemas.meta import ObjectMeta
from schemas.node import Node, effective_labels, matches
from tests.support.macs import mac_status
from tests.support.world import deployment

LABELS = {"rack": "1", "fleet/os": "agent-says"}
STATUS = mac_status("mac").model_copy(update={"chip": "Apple M4 Max", "labels": LABELS})


def test_a_node_without_a_report_has_its_owners_labels() -> None:
    node = Node(metadata=ObjectMeta(name="a", labels={"rack": "2"}))
    assert effective_labels(node) == {"fleet/node": "a", "rack": "2"}


def test_owner_labels_override_agent_labels_and_derived_ones() -> None:
    node = Node(metadata=ObjectMeta(name="a", labels={"rack": "2"}), status=STATUS)
    assert effective_labels(node) == {
        "fleet/node": "a",
        "fleet/os": "agent-says",
        "fleet/chip": "Apple-M4-Max",
        "rack": "2",
    }


@pytest.mark.parametrize(("wanted", "expected"), [
    ({}, True), ({"a": "1"}, True), ({"a": "1", "b": ""}, True), ({"a": "2"}, False),
    ({"c": ""}, False), ({"a": "1", "c": "3"}, False),
])  # fmt: skip
def test_a_selector_needs_all_its_labels(wanted: dict[str, str], *, expected: bool) -> None:
    assert matches({"a": "1", "b": ""}, wanted) == expected


def test_a_deployments_own_name_comes_first_without_repeats() -> None:
    plain = deployment()
    spec = plain.spec.model_copy(update={"served_names": ("fast", "qwen", "fast")})
    assert served_names(plain) == ("qwen",)
    assert served_names(plain.model_copy(update={"spec": spec})) == ("qwen", "fast")
