"""The models and adapters that a node inspects."""

import pytest

from models.inspection import fallback_models, named_adapters, named_models, split_models
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


def test_named_models_are_own_draft_and_fallback_models() -> None:
    made = deployment()
    spec = made.spec.model_copy(update={"sharding": "Auto"})
    found = named_models([made.model_copy(update={"spec": spec})], [group("pair", "small")])
    assert found == {made.spec.model.path, "small"}


def test_models_that_are_never_split_are_left_out() -> None:
    made = deployment()
    spec = made.spec.model_copy(update={"sharding": "Never"})
    assert split_models([made.model_copy(update={"spec": spec})], [group("pair", "small")]) == set()


def test_adapters_that_deployments_name() -> None:
    made = deployment()
    model = made.spec.model.model_copy(update={"adapter": "lora"})
    spec = made.spec.model_copy(update={"model": model})
    assert named_adapters([made, made.model_copy(update={"spec": spec})]) == {"lora"}
