"""The models and adapters that a node inspects."""

import pytest

from models.inspection import model_use, named_adapters, named_models, split_models
from schemas.deployment import DraftModel, ModelDeployment
from schemas.meta import ObjectMeta
from schemas.shardgroup import Fallback, GroupMember, ShardGroup, ShardGroupSpec
from tests.support.world import deployment

MEMBERS = (GroupMember(node="a"), GroupMember(node="b"))


def group(name: str, *models: str) -> ShardGroup:
    fallbacks = (Fallback(size=2), *(Fallback(model=model) for model in models))
    spec = ShardGroupSpec(members=MEMBERS, fallbacks=fallbacks)
    return ShardGroup(metadata=ObjectMeta(name=name), spec=spec)


def declared(**spec: object) -> ModelDeployment:
    made = deployment()
    return made.model_copy(update={"spec": made.spec.model_copy(update=spec)})


@pytest.mark.parametrize(("sharding", "wanted"), [
    ("Never", set()), ("pair", {"small"}), ("Auto", {"small", "tiny"}), ("other", set()),
])  # fmt: skip
def test_fallbacks_of_the_groups_that_are_used(sharding: str, wanted: set[str]) -> None:
    groups = [group("pair", "small"), group("trio", "tiny")]
    use = model_use(declared(sharding=sharding), groups)
    own = deployment().spec.model.path
    assert set(use.models) == {own, *wanted}
    assert set(use.split_models) == ({own, *wanted} if sharding != "Never" else set())
    assert use.is_split == (sharding != "Never")


def test_named_models_are_own_draft_and_fallback_models() -> None:
    model = deployment().spec.model.model_copy(update={"draft": DraftModel(path="draft")})
    use = model_use(declared(sharding="Auto", model=model), [group("pair", "small")])
    assert named_models([use]) == {model.path, "draft", "small"}
    assert split_models([use]) == {model.path, "small"}


def test_models_that_are_never_split_are_left_out() -> None:
    assert split_models([model_use(declared(sharding="Never"), [group("pair", "small")])]) == set()


def test_adapters_that_deployments_name() -> None:
    model = deployment().spec.model.model_copy(update={"adapter": "lora"})
    uses = [model_use(declared(), ()), model_use(declared(model=model), ())]
    assert named_adapters(uses) == {"lora"}
