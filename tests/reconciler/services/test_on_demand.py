"""Models on demand: a client names a repository, the leader decides by the policy and the hub, and the client is answered."""

import asyncio
import json
from typing import Any

import pytest

from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from models.hub.hub_settings import HubSettings
from models.hub.remote_inspection import RepositoryFacts, card_licenses
from reconciler.services import on_demand
from reconciler.services.on_demand import PolicyUsage, judge, manager_of
from schemas.deployment import ModelDeployment
from schemas.modelpolicy import (
    ON_DEMAND_LABEL,
    ModelPolicy,
    ModelPolicyStatus,
    OnDemand,
    on_demand_name,
    policy_for,
)
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete
from tests.support import reconciler_world
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_world import Running, published, running_gateway
from tests.support.hub import REPO, StandInHub
from tests.support.hub_repositories import servable_files
from tests.support.waiting import until_async

CLOCK = SystemClock()
RULES = {
    "owners": ["mlx-community"],
    "licenses": ["apache-2.0", "mit"],
    "maxSize": "1Gi",
    "maxTotalSize": "2Gi",
    "maxModels": 1,
}
CARD = b"---\nlicense: apache-2.0\ntags:\n- mlx\n---\n# Tiny\n"


def policy(name: str, **rules: object) -> ModelPolicy:
    tree = {"metadata": {"name": name}, "spec": {"onDemand": {**RULES, **rules}}}
    return ModelPolicy.model_validate_json(json.dumps(tree))


def rules(**more: object) -> OnDemand:
    return policy("community", **more).spec.on_demand


FACTS = RepositoryFacts(commit="a" * 40, size_bytes=2**29, licenses=("other", "mit"))
NONE = PolicyUsage(models=0, total_bytes=0)


@pytest.mark.parametrize(
    ("allowed", "facts", "usage", "reason"),
    [
        (rules(), FACTS, NONE, None),
        (rules(maxSize="511Mi"), FACTS, NONE, "TooLarge"),
        (rules(licenses=["apache-2.0"]), FACTS, NONE, "LicenseNotAllowed"),
        (rules(), FACTS, PolicyUsage(models=1, total_bytes=0), "TooManyModels"),
        (rules(), FACTS, PolicyUsage(models=0, total_bytes=2**31), "TooManyBytes"),
    ],
)
def test_a_policy_decides_by_size_licence_and_what_exists(
    allowed: OnDemand, facts: RepositoryFacts, usage: PolicyUsage, reason: str | None
) -> None:
    denial = judge(allowed, facts, usage)
    assert (None if denial is None else denial.reason) == reason


@pytest.mark.parametrize(
    ("card", "licenses"),
    [
        (CARD.decode(), ("apache-2.0",)),
        ("---\r\nlicense: MIT\r\n---\r\n", ("mit",)),
        ('---\nlicense: other\nlicense_name: "llama4"\n---\n', ("other", "llama4")),
        ("---\nlicense:\n- mit\n- apache-2.0\nbase: x\n---\n", ("mit", "apache-2.0")),
        ("# Tiny\nlicense: mit\n", ()),
        ("---\ntitle: x\n---\nlicense: mit\n", ()),
        ("", ()),
    ],
)
def test_a_card_names_its_licence_in_its_front_matter(card: str, licenses: tuple[str, ...]) -> None:
    assert card_licenses(card) == licenses


def test_the_first_policy_by_name_that_names_the_owner_decides() -> None:
    policies = [policy("b"), policy("a"), policy("0", owners=["other"])]
    found = policy_for(policies, "MLX-community/x")
    assert found is not None
    assert found.name == "a"
    assert policy_for(policies, "nobody/x") is None
    assert on_demand_name(REPO) != on_demand_name(REPO.upper())


async def created(store: MemoryTransport) -> ModelDeployment:
    async def look() -> ModelDeployment | None:
        item = await store.get(keys.spec_key("ModelDeployment", on_demand_name(REPO)))
        return None if item is None else codec.decode_object(ModelDeployment, item)

    return await until_async(look, what="the deployment")


async def ask(gateway: Running, model: str) -> tuple[int, Any]:
    status, body, _ = await gateway.chat(model=model)
    return status, body


async def test_a_model_that_nobody_declared_is_deployed_used_and_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_demand, "_SWEEP_S", 0.2)
    files = servable_files() | {"README.md": CARD}
    closed = servable_files()
    hub = StandInHub(repos={REPO: files, "mlx-community/Closed": closed, "mlx-community/B": files})
    store, limits = MemoryTransport(CLOCK), GatewayLimits(hold_timeout_s=60.0, drain_timeout_s=0.0)
    async with (
        hub.serve(),
        running_gateway(store, limits) as gateway,
        reconciler_world.leading(store, hubs=HubSettings(endpoint=hub.endpoint)),
    ):
        await store.commit([], [codec.put_spec(policy("community"))])
        models = gateway.gateway.on_demand

        async def is_known() -> bool:
            return bool(models.policies()) and gateway.gateway.table_cache.is_synced

        await until_async(is_known, what="the policy")
        (engine,) = await gateway.start(chat, of=on_demand_name(REPO))
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(ask(gateway, REPO))
            deployment = await created(store)
            await gateway.world.put(published(engine, deployment.name))
        assert asked.result()[0] == 200
        assert deployment.metadata.labels == {ON_DEMAND_LABEL: "community"}
        assert [entry.manager for entry in deployment.metadata.managed_fields] == [
            manager_of("community")
        ]
        scaling, source = deployment.spec.autoscaling, deployment.spec.model.hub
        assert scaling is not None
        assert source is not None
        assert (scaling.min_replicas, scaling.max_replicas, deployment.spec.replicas) == (0, 1, 0)
        assert source.is_pinned

        for repo, expected, words in (
            ("nobody/Tiny", 404, "Allowed owners are mlx-community"),
            ("mlx-community/Closed", 403, "names the licence none"),
            ("mlx-community/B", 403, "maxModels is 1"),
            ("mlx-community/Gone", 403, "has no"),
        ):
            code, body = await ask(gateway, repo)
            assert (code, words in body["error"]["message"]) == (expected, True), body
        item = await store.get(keys.status_key("ModelPolicy", "community"))
        assert item is not None
        status = codec.decode(ModelPolicyStatus, item)
        assert status.models == 1
        assert {refusal.repo for refusal in status.refusals} >= {"mlx-community/Closed"}

        await store.commit([], [Delete(key=keys.spec_key("ModelPolicy", "community"))])

        async def is_ending() -> bool:
            item = await store.get(keys.spec_key("ModelDeployment", deployment.name))
            if item is None:
                return True
            return (
                codec.decode_object(ModelDeployment, item).metadata.deletion_timestamp is not None
            )

        await until_async(is_ending, what="the deletion")
