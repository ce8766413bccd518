"""Tests of `manifests.validate`: references between objects, names that must be unique, and shard groups."""

import json

import pytest

from machinery.clock import SystemClock
from manifests import apply, delete
from manifests.errors import InUseError
from manifests.validate import StoreNames, validate
from schemas.route import ModelRoute
from store.port import Transport
from tests.support.manifests_texts import HEAD, deployment, in_pool, pool, read, route


def known_route(name: str, model: str, deployment: str) -> ModelRoute:
    tree = {
        "apiVersion": "fleet/v1alpha1",
        "kind": "ModelRoute",
        "metadata": {"name": name},
        "spec": {"model": model, "backends": [{"deployment": deployment}]},
    }
    return ModelRoute.model_validate_json(json.dumps(tree))


def group(members: str) -> str:
    return f"---\n{HEAD}kind: ShardGroup\nmetadata: {{name: g}}\nspec:\n  members: {members}\n"


TOGETHER = "or apply its manifest together with this one"
CASES = [
    pytest.param(deployment(rest=in_pool()) + pool(), StoreNames(), [], id="pool-beside-it"),
    pytest.param(
        deployment(rest=in_pool()),
        StoreNames(node_pools=frozenset({"studio"})),
        [],
        id="pool-in-store",
    ),
    pytest.param(
        deployment(rest=in_pool("studoi")),
        StoreNames(node_pools=frozenset({"studio", "attic"})),
        [
            ":11:13: ModelDeployment/qwen: spec.placement.pools[0]: there is no NodePool studoi. "
            f"Did you mean studio? Create it first, {TOGETHER}"
        ],
        id="pool-misspelled",
    ),
    pytest.param(
        deployment(rest=in_pool()),
        StoreNames(),
        [
            ":11:13: ModelDeployment/qwen: spec.placement.pools[0]: there is no NodePool studio. "
            f"Create it first, {TOGETHER}"
        ],
        id="no-pool-at-all",
    ),
    pytest.param(
        deployment("a", rest="  servedNames: [fast]\n")
        + deployment("b", rest="  servedNames: [fast, a]\n"),
        StoreNames(),
        [],
        id="tiers-are-shared",
    ),
    pytest.param(
        deployment("a" * 116),
        StoreNames(),
        [
            f":5:9: ModelDeployment/{'a' * 116}: metadata.name: has 116 characters, so the names of "
            "its revisions would have 129; at most 128 are allowed. Use 115 characters or fewer"
        ],
        id="revision-name-overflows",
    ),
    pytest.param(deployment("a" * 115), StoreNames(), [], id="revision-name-just-fits"),
    pytest.param(
        deployment("chat"),
        StoreNames(
            model_deployments=frozenset({"qwen"}),
            model_routes=(known_route("r", "chat", "qwen"),),
        ),
        [
            ':5:9: ModelDeployment/chat: metadata.name: ModelRoute/r sends the model "chat" to other '
            "deployments. Use another name, or add the deployment to the route's backends"
        ],
        id="name-taken-by-a-route-in-the-store",
    ),
    pytest.param(
        f"{HEAD}kind: NodePool\nmetadata: {{name: p}}\nspec: {{}}\n",
        StoreNames(),
        [
            ":4:1: NodePool/p: spec: names no nodes and has no selector, so no Mac would be in the "
            "pool. Write: nodes: [name-of-a-mac], or a selector ({} takes every Mac)"
        ],
        id="pool-of-nothing",
    ),
    pytest.param(
        f"{HEAD}kind: NodePool\nmetadata: {{name: p}}\nspec: {{selector: {{}}}}\n",
        StoreNames(),
        [],
        id="pool-of-everything",
    ),
    pytest.param(
        f"{HEAD}kind: NodePool\nmetadata: {{name: p}}\nspec: {{nodes: [a, b, a, a]}}\n",
        StoreNames(),
        [":4:22: NodePool/p: spec.nodes[2]: a is named twice. Remove one of them"],
        id="node-twice",
    ),
    pytest.param(
        group("[{node: a}, {node: a}]"),
        StoreNames(),
        [":6:31: ShardGroup/g: spec.members[1].node: a is named twice. Remove one of them"],
        id="member-twice",
    ),
    pytest.param(group("[{node: a}, {node: b}]"), StoreNames(), [], id="members"),
    pytest.param(route() + deployment(), StoreNames(), [], id="backend-beside-it"),
    pytest.param(
        route(), StoreNames(model_deployments=frozenset({"qwen"})), [], id="backend-in-store"
    ),
    pytest.param(
        route(backends="[{deployment: qwe}]"),
        StoreNames(model_deployments=frozenset({"qwen"})),
        [
            ":8:27: ModelRoute/chat: spec.backends[0].deployment: there is no ModelDeployment qwe. "
            f"Did you mean qwen? Create it first, {TOGETHER}"
        ],
        id="backend-misspelled",
    ),
    pytest.param(
        route(backends="[{deployment: qwen}, {deployment: qwen}]") + deployment(),
        StoreNames(),
        [
            ":8:47: ModelRoute/chat: spec.backends[1].deployment: qwen is named twice. "
            "Remove one of them"
        ],
        id="backend-twice",
    ),
    pytest.param(
        route(backends="[{deployment: qwen, weight: 0}]") + deployment(),
        StoreNames(),
        [
            ":8:3: ModelRoute/chat: spec.backends: every weight is 0, so no backend would get a "
            "request. Give one of them a weight"
        ],
        id="no-weight",
    ),
    pytest.param(
        route(model="other") + deployment() + deployment("other"),
        StoreNames(),
        [
            ":7:10: ModelRoute/chat: spec.model: ModelDeployment/other serves this name itself, and is not among the backends. Add it to the backends or fallbacks, or route another name "
            "than other"
        ],
        id="takes-a-deployments-name",
    ),
    pytest.param(
        route(model="qwen") + deployment(), StoreNames(), [], id="canary-under-its-own-name"
    ),
    pytest.param(
        route(model="other") + "  fallbacks: [other]\n" + deployment() + deployment("other"),
        StoreNames(),
        [],
        id="own-name-as-a-fallback",
    ),
    pytest.param(
        route() + "  fallbacks: [qwem]\n" + deployment(),
        StoreNames(),
        [
            ":9:15: ModelRoute/chat: spec.fallbacks[0]: there is no ModelDeployment qwem. "
            f"Did you mean qwen? Create it first, {TOGETHER}"
        ],
        id="fallback-misspelled",
    ),
    pytest.param(
        route()
        + "  rules: [{headers: [{name: x}], backends: [{deployment: y, weight: 0}]}]\n"
        + deployment(),
        StoreNames(),
        [
            ":9:58: ModelRoute/chat: spec.rules[0].backends[0].deployment: there is no "
            f"ModelDeployment y. Create it first, {TOGETHER}",
            ":9:34: ModelRoute/chat: spec.rules[0].backends: every weight is 0, so no backend "
            "would get a request. Give one of them a weight",
        ],
        id="backend-of-a-rule",
    ),
    pytest.param(
        route("a") + route("b") + deployment(),
        StoreNames(),
        [
            ':15:10: ModelRoute/b: spec.model: ModelRoute/a at standard input:2 already routes "chat". '
            "Put all backends into one route"
        ],
        id="rivals",
    ),
    pytest.param(
        route("a"),
        StoreNames(
            model_deployments=frozenset({"qwen"}),
            model_routes=(known_route("b", "chat", "qwen"), known_route("a", "chat", "qwen")),
        ),
        [
            ':7:10: ModelRoute/a: spec.model: ModelRoute/b already routes "chat". '
            "Put all backends into one route"
        ],
        id="rival-in-store",
    ),
    pytest.param(f"{HEAD}kind: Node\nmetadata: {{name: mac-1}}\n", StoreNames(), [], id="node"),
]


@pytest.mark.parametrize(("text", "known", "expected"), CASES)
def test_references_and_names_are_checked_between_objects(
    text: str, known: StoreNames, expected: list[str]
) -> None:
    errors = validate(read(text), known)
    assert [str(problem).removeprefix("standard input") for problem in errors] == expected


CLOCK = SystemClock()
SHARDED = deployment(rest="  sharding: pair\n")


def shard_group(spec: str, *, name: str = "pair") -> str:
    """Return a group of a and b with these extra lines in its spec."""
    head = f"---\n{HEAD}kind: ShardGroup\nmetadata: {{name: {name}}}\nspec:\n"
    return f"{head}  members: [{{node: a}}, {{node: b}}]\n{spec}"


PAIR = shard_group("")

GROUP_CASES = [
    pytest.param(SHARDED + PAIR, StoreNames(), [], id="beside-it"),
    pytest.param(SHARDED, StoreNames(shard_groups=frozenset({"pair"})), [], id="in-the-store"),
    pytest.param(deployment(rest="  sharding: Auto\n"), StoreNames(), [], id="auto-names-none"),
    pytest.param(
        SHARDED,
        StoreNames(shard_groups=frozenset({"pairs", "trio"})),
        [
            "spec.sharding: there is no ShardGroup pair. Did you mean pairs? Create it first, or apply "
            "its manifest together with this one"
        ],
        id="misspelled",
    ),
    pytest.param(
        shard_group("  fallbacks: [{parallelism: Pipeline}, {model: qwen-4bit}]\n"),
        StoreNames(),
        [],
        id="sensible-fallbacks",
    ),
    pytest.param(
        shard_group("  parallelism: Tensor\n  fallbacks: [{parallelism: Tensor}]\n"),
        StoreNames(),
        [
            "spec.fallbacks[0]: is the same as the group itself, which has failed by then. "
            "Change its parallelism, size or model, or remove it"
        ],
        id="no-fallback",
    ),
    pytest.param(
        shard_group("  fallbacks: [{model: small}, {model: small, size: 2}]\n"),
        StoreNames(),
        [
            "spec.fallbacks[1]: is the same as an earlier fallback, which has failed by then. "
            "Change its parallelism, size or model, or remove it"
        ],
        id="the-same-again",
    ),
    pytest.param(
        shard_group("  fallbacks: [{size: 3}]\n"),
        StoreNames(),
        [
            "spec.fallbacks[0].size: is 3, and the group has 2 members. "
            "Write a smaller size: a fallback uses fewer Macs"
        ],
        id="more-than-there-are",
    ),
    pytest.param(
        f"---\n{HEAD}kind: ShardGroup\nmetadata: {{name: g}}\nspec:\n  selector: {{}}\n  size: 4\n"
        "  backend: jaccl\n  fallbacks: [{size: 9}]\n",
        StoreNames(),
        ["spec.fallbacks[0].size: is 9, and JACCL connects 8 at most. Use 8 or fewer"],
        id="more-than-jaccl-connects",
    ),
    pytest.param(
        f"---\n{HEAD}kind: ShardGroup\nmetadata: {{name: g}}\nspec:\n"
        "  members: [{node: a, rdma: {c: [rdma_en5], a: [rdma_en4]}}, {node: b}]\n",
        StoreNames(),
        [
            "spec.members[0].rdma.c: c is not a member of the group. List the devices towards each of the other members",
            "spec.members[0].rdma.a: a is the member itself. List the devices towards each of the other members",
        ],
        id="devices-towards-strangers",
    ),
]


@pytest.mark.parametrize(("text", "known", "wanted"), GROUP_CASES)
def test_shard_groups_are_checked(text: str, known: StoreNames, wanted: list[str]) -> None:
    found = [str(problem) for problem in validate(read(text), known)]
    assert len(found) == len(wanted)
    for line, end in zip(found, wanted, strict=True):
        assert line.endswith(end)


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
