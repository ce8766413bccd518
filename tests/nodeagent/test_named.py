"""Which models agents look at beside those that deployments name."""

import pytest

from nodeagent.named import fallback_models
from schemas.meta import ObjectMeta
from schemas.shardgroup import Fallback, GroupMember, ShardGroup, ShardGroupSpec
from tests.support.fleets import deployment

MEMBERS = (GroupMember(node="a"), GroupMember(node="b"))


def group(name: str, *models: str) -> ShardGroup:
    fallbacks = (Fallback(size=2), *(Fallback(model=model) for model in models))
    spec = ShardGroupSpec(members=MEMBERS, fallbacks=fallbacks)
    return ShardGroup(metadata=ObjectMeta(name=name), spec=spec)


@pytest.mark.parametrize(
    ("sharding", "wanted"),
    [("Never", set()), ("pair", {"small"}), ("Auto", {"small", "tiny"}), ("other", set())],
)
def test_fallbacks_of_the_groups_that_are_used(sharding: str, wanted: set[str]) -> None:
    made = deployment()
    made = made.model_copy(update={"spec": made.spec.model_copy(update={"sharding": sharding})})
    groups = [group("pair", "small"), group("trio", "tiny")]
    assert fallback_models([made], groups) == wanted
