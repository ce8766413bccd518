"""Tests of `manifests.validate`: references between objects, names that must be unique, and shard groups."""

import pytest

from machinery.clock import SystemClock
from manifests import apply, delete
from manifests.errors import InUseError
from manifests.validate import StoreNames, validate
from schemas.meta import ObjectMeta
from schemas.route import Backend, ModelRoute, ModelRouteSpec
from store.port import Transport
from tests.support.golden_cases import Golden
from tests.support.manifests_texts import HEAD, deployment, in_pool, pool, read, route


def known_route(name: str, model: str, deployment: str) -> ModelRoute:
    spec = ModelRouteSpec(model=model, backends=(Backend(deployment=deployment),))
    return ModelRoute(metadata=ObjectMeta(name=name), spec=spec)


def group(members: str) -> str:
    return f"---\n{HEAD}kind: ShardGroup\nmetadata: {{name: g}}\nspec:\n  members: {members}\n"


def empty_pool(spec: str) -> str:
    return f"{HEAD}kind: NodePool\nmetadata: {{name: p}}\nspec: {spec}\n"


def of_group(spec: str) -> str:
    return f"---\n{HEAD}kind: ShardGroup\nmetadata: {{name: g}}\nspec:\n{spec}"


def shard_group(spec: str, *, name: str = "pair") -> str:
    """Return a group of a and b with these extra lines in its spec."""
    head = f"---\n{HEAD}kind: ShardGroup\nmetadata: {{name: {name}}}\nspec:\n"
    return f"{head}  members: [{{node: a}}, {{node: b}}]\n{spec}"


def policy(pool: str) -> str:
    """Return a policy for models on demand in a pool."""
    bounds = "owners: [o], licenses: [mit], maxSize: 1Gi, maxTotalSize: 1Gi"
    head = f"---\n{HEAD}kind: ModelPolicy\nmetadata: {{name: p}}\nspec:\n"
    return f"{head}  onDemand: {{{bounds}, pools: [{pool}]}}\n"


PAIR = shard_group("")
SHARDED = deployment(rest="  sharding: pair\n")
QWEN = frozenset({"qwen"})
# Each text, and what the store has.
VALID = {
    "pool-beside-it": (deployment(rest=in_pool()) + pool(), StoreNames()),
    "pool-in-store": (deployment(rest=in_pool()), StoreNames(node_pools=frozenset({"studio"}))),
    "tiers-are-shared": (
        deployment("a", rest="  servedNames: [fast]\n") + deployment("b", rest="  servedNames: [fast, a]\n"),
        StoreNames(),
    ),
    "revision-name-just-fits": (deployment("a" * 115), StoreNames()),
    "pool-of-everything": (empty_pool("{selector: {}}"), StoreNames()),
    "members": (group("[{node: a}, {node: b}]"), StoreNames()),
    "backend-beside-it": (route() + deployment(), StoreNames()),
    "backend-in-store": (route(), StoreNames(model_deployments=QWEN)),
    "canary-under-its-own-name": (route(model="qwen") + deployment(), StoreNames()),
    "own-name-as-a-fallback": (
        route(model="other") + "  fallbacks: [other]\n" + deployment() + deployment("other"), StoreNames(),
    ),
    "node": (f"{HEAD}kind: Node\nmetadata: {{name: mac-1}}\n", StoreNames()),
    "group-beside-it": (SHARDED + PAIR, StoreNames()),
    "group-in-the-store": (SHARDED, StoreNames(shard_groups=frozenset({"pair"}))),
    "policy-with-its-pool": (policy("studio") + "---\n" + pool(), StoreNames()),
    "auto-names-no-group": (deployment(rest="  sharding: Auto\n"), StoreNames()),
    "sensible-fallbacks": (
        shard_group("  fallbacks: [{parallelism: Pipeline}, {model: qwen-4bit}]\n"), StoreNames(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALID)
def test_references_that_hold(name: str) -> None:
    text, known = VALID[name]
    assert validate(read(text), known) == []


IN_STORE = StoreNames(
    node_pools=frozenset({"studio", "attic"}),
    model_deployments=QWEN,
    model_routes=(known_route("r", "chat", "qwen"), known_route("a", "talk", "qwen")),
    shard_groups=frozenset({"pairs", "trio"}),
)
BROKEN = {
    "Deployments": [
        deployment(rest=in_pool("studoi")),
        deployment(rest=in_pool("zzz")),
        deployment("a" * 116),
        deployment("chat"),
        SHARDED,
        policy("studoi"),
    ],
    "Pools and groups": [
        empty_pool("{}"),
        empty_pool("{nodes: [a, b, a, a]}"),
        group("[{node: a}, {node: a}]"),
        shard_group("  parallelism: Tensor\n  fallbacks: [{parallelism: Tensor}]\n"),
        shard_group("  fallbacks: [{model: small}, {model: small, size: 2}]\n"),
        shard_group("  fallbacks: [{size: 3}]\n"),
        of_group("  selector: {}\n  size: 4\n  backend: jaccl\n  fallbacks: [{size: 9}]\n"),
        of_group("  members: [{node: a, rdma: {c: [rdma_en5], a: [rdma_en4]}}, {node: b}]\n"),
    ],
    "Routes": [
        route(model="new", backends="[{deployment: qwe}]"),
        route(model="new", backends="[{deployment: qwen}, {deployment: qwen}]"),
        route(model="new", backends="[{deployment: qwen, weight: 0}]"),
        route(model="other") + deployment() + deployment("other"),
        route(model="new") + "  fallbacks: [qwem]\n",
        route(model="new") + "  rules: [{headers: [{name: x}], backends: [{deployment: y, weight: 0}]}]\n",
        route("b", model="new") + route("c", model="new"),
        route("a"),
    ],
}  # fmt: skip


def test_messages_about_references_and_names(golden: Golden) -> None:
    """The store has the pools studio and attic, the deployment qwen, the groups pairs and trio, and two routes."""

    def messages(text: str) -> list[str]:
        problems = validate(read(text), IN_STORE)
        return [str(problem).removeprefix("standard input") for problem in problems]

    sections = {
        title: [(text, messages(text)) for text in texts] for title, texts in BROKEN.items()
    }
    golden.check("manifests/references.txt", sections)


CLOCK = SystemClock()


async def test_a_group_in_use_is_not_deleted(transport: Transport) -> None:
    await apply.apply(transport, read(PAIR + SHARDED), CLOCK)
    with pytest.raises(InUseError) as caught:
        await delete.delete(transport, "ShardGroup", "pair", CLOCK)
    assert str(caught.value) == (
        "ShardGroup/pair is used by ModelDeployment/qwen. Change or delete it first"
    )
    await apply.apply(transport, read(deployment()), CLOCK)
    await delete.delete(transport, "ShardGroup", "pair", CLOCK)


async def test_a_group_in_the_store_resolves_the_reference(transport: Transport) -> None:
    await apply.apply(transport, read(PAIR), CLOCK)
    await apply.apply(transport, read(SHARDED), CLOCK)
