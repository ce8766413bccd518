"""Invalid values of every kind are refused, and the error names the field."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.deployment import ModelDeployment
from schemas.gitsource import GitSource
from schemas.kinds import KINDS
from schemas.meta import ApiObject
from schemas.modelpolicy import ModelPolicy
from schemas.node import Node
from schemas.pools import NodePool
from schemas.route import ModelRoute
from schemas.shardgroup import ShardGroup

Tree = dict[str, Any]
GOOD: dict[type[ApiObject], Tree] = {
    ModelDeployment: {"model": {"path": "qwen"}},
    NodePool: {},
    ShardGroup: {"members": [{"node": "a"}, {"node": "b"}]},
    ModelRoute: {"model": "fast", "backends": [{"deployment": "qwen"}]},
    ModelPolicy: {
        "onDemand": {
            "owners": ["mlx-community"],
            "licenses": ["mit"],
            "maxSize": "20Gi",
            "maxTotalSize": "100Gi",
        }
    },
    GitSource: {"repository": "https://git.example.com/fleet.git"},
    Node: {},
}


def read(kind: type[ApiObject], spec: object) -> ApiObject:
    return kind.model_validate_json(json.dumps({"metadata": {"name": "a"}, "spec": spec}))


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
def test_the_shortest_valid_object_is_accepted_and_nothing_shorter(kind: type[ApiObject]) -> None:
    assert read(kind, GOOD[kind]).kind == kind.__name__
    odd: list[object] = [None, [], "x", 7]
    for spec in odd:
        with pytest.raises(ValidationError, match="spec"):
            read(kind, spec)


def test_every_user_kind_is_covered() -> None:
    assert set(GOOD) == {kind.type for kind in KINDS if kind.written_by_users}


DEPLOYMENT: list[tuple[str, Tree]] = [
    ("model", {"model": {}}),
    ("model.path", {"model": {"path": "../secrets"}}),
    ("model.path", {"model": {"path": "a\nb"}}),
    ("model.path", {"model": {"path": "p" * 1025}}),
    ("model.adapter", {"model": {"path": "qwen", "adapter": "../a"}}),
    ("model", {"model": {"path": "qwen", "adapter": "qwen/"}}),
    ("routing.rateLimit", {"routing": {"rateLimit": {}}}),
    ("routing.healthCheck", {"routing": {"healthCheck": {"interval": "999ms"}}}),
    (
        "routing.healthCheck.unhealthyThreshold",
        {"routing": {"healthCheck": {"unhealthyThreshold": 0}}},
    ),
    ("routing.rateLimit.tokensPerMinute", {"routing": {"rateLimit": {"tokensPerMinute": 0}}}),
    ("sharding", {"sharding": "Sometimes"}),
    ("", {"sharding": "pair", "contextLength": 255}),
    ("", {"sharding": "Auto", "model": {"path": "qwen", "adapter": "lora"}}),
    ("", {"sharding": "pair", "model": {"path": "qwen", "draft": {"path": "small"}}}),
    ("model.draft.tokens", {"model": {"path": "qwen", "draft": {"path": "s", "tokens": 0}}}),
    ("model.draft.tokens", {"model": {"path": "qwen", "draft": {"path": "s", "tokens": 17}}}),
    ("model.ngram.tokens", {"model": {"path": "qwen", "ngram": {"tokens": 17}}}),
    ("model", {"model": {"path": "qwen", "ngram": {}, "draft": {"path": "small"}}}),
    ("model.mtp.tokens", {"model": {"path": "qwen", "mtp": {"tokens": 0}}}),
    ("model", {"model": {"path": "qwen", "ngram": {}, "mtp": {}}}),
    ("", {"sharding": "pair", "model": {"path": "qwen", "mtp": {}}}),
    ("", {"sharding": "pair", "model": {"path": "qwen", "ngram": {}}}),
    ("model", {"model": {"path": "/m/qwen", "draft": {"path": "/m//qwen"}}}),
    ("sampling.maxTokens", {"sampling": {"maxTokens": 0}}),
    ("sampling.temperature", {"sampling": {"temperature": 2.1}}),
    ("sampling.top_p", {"sampling": {"top_p": 0.5, "topP": 0.5}}),
    ("unknownParameters", {"unknownParameters": "Ignore"}),
    ("queueDepth", {"queueDepth": -1}),
    ("queueDepth", {"queueDepth": 65_537}),
    ("kvCache.bits", {"kvCache": {"bits": 6}}),
    ("kvCache.tokens", {"kvCache": {"tokens": 0}}),
    ("", {"kvCache": {"tokens": 4095}}),
    ("kvCache.window", {"kvCache": {"window": 15}}),
    ("kvCache.keep", {"kvCache": {"window": 16, "keep": 0}}),
    ("kvCache", {"kvCache": {"keep": 4}}),
    ("kvCache", {"kvCache": {"window": 16, "keep": 9}}),
    ("kvCache.diskBytes", {"kvCache": {"diskBytes": "0"}}),
    ("", {"sharding": "Auto", "kvCache": {"diskBytes": "1Gi"}}),
    ("kvCache.prefixBytes", {"kvCache": {"prefixBytes": "4GB"}}),
    ("kvCache", {"kvCache": {"bits": 8, "window": 64}}),
    ("", {"kvCache": {"window": 4096}}),
    ("servedNames.0", {"servedNames": ["-fast"]}),
    ("servedNames.0", {"servedNames": ["n" * 201]}),
    ("replicas", {"replicas": -1}),
    ("replicas", {"replicas": 10_001}),
    ("replicas", {"replicas": "2"}),
    ("contextLength", {"contextLength": 15}),
    ("contextLength", {"contextLength": 16_777_217}),
    ("concurrency", {"concurrency": 0}),
    ("concurrency", {"concurrency": 1025}),
    ("placement.pools.0", {"placement": {"pools": ["Big"]}}),
    ("placement.nodeSelector", {"placement": {"nodeSelector": {"a": "b c"}}}),
    ("placement.tolerations.0", {"placement": {"tolerations": [{}]}}),
    (
        "placement.tolerations.0",
        {"placement": {"tolerations": [{"key": "a", "operator": "Exists", "value": "x"}]}},
    ),
    ("placement.tolerations.0.effect", {"placement": {"tolerations": [{"effect": "No"}]}}),
    ("placement.minGpuCores", {"placement": {"minGpuCores": -1}}),
    ("placement.tier", {"placement": {"tier": "auto"}}),
    ("placement.tier", {"placement": {"tier": {"minGpuCores": -1}}}),
    (
        "placement.antiAffinity.deployments.0",
        {"placement": {"antiAffinity": {"deployments": ["A"]}}},
    ),
    ("placement.maxReplicasPerNode", {"placement": {"maxReplicasPerNode": 0}}),
    ("placement.spreadBy.0", {"placement": {"spreadBy": ["a b"]}}),
    ("placement.spreadBy", {"placement": {"spreadBy": ["a", "b", "c", "d", "e"]}}),
    ("placement.weights", {"placement": {"weights": {"luck": 1}}}),
    ("placement.weights.speed", {"placement": {"weights": {"speed": 101}}}),
    ("resources.memory", {"resources": {"memory": "0"}}),
    ("priority", {"priority": 1_000_001}),
    ("minAvailable", {"minAvailable": -1}),
    ("minAvailable", {"minAvailable": "110%"}),
    ("rollout.maxSurge", {"rollout": {"maxSurge": "some"}}),
    ("rollout.progressDeadline", {"rollout": {"progressDeadline": "1d"}}),
    ("rollout.canary.steps", {"rollout": {"canary": {"steps": []}}}),
    ("rollout.canary.steps.0.weight", {"rollout": {"canary": {"steps": [{"weight": 0}]}}}),
    ("autoscaling.maxReplicas", {"autoscaling": {}}),
    ("autoscaling", {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}),
    (
        "autoscaling.schedule.0",
        {
            "autoscaling": {
                "maxReplicas": 9,
                "schedule": [
                    {"start": "0 8 * * *", "end": "0 9 * * *", "minReplicas": 3, "maxReplicas": 2}
                ],
            }
        },
    ),
    (
        "autoscaling.schedule.0.start",
        {
            "autoscaling": {
                "maxReplicas": 2,
                "schedule": [{"start": "99 * * * *", "end": "0 1 * * *"}],
            }
        },
    ),
]
POOL: list[tuple[str, Tree]] = [
    ("nodes.0", {"nodes": ["Mac 1"]}),
    ("selector.matchLabels", {"selector": {"matchLabels": {"": "a"}}}),
    ("selector.minMemory", {"selector": {"minMemory": "64GB"}}),
    ("selector.minMemory", {"selector": {"minMemory": "9" * 33}}),
    ("policy.quietHours.0.start", {"policy": {"quietHours": [{"start": "25:00", "end": "07:00"}]}}),
    ("policy.quietHours.0.timeZone", {"policy": {"quietHours": [{"start": "22:00", "end": "07:00", "timeZone": "Mars/Base"}]}}),
    ("policy.ownerActive", {"policy": {"ownerActive": "Evict"}}),
    ("reserved.memory", {"reserved": {"memory": "-1Gi"}}),
    ("downloadLimit", {"downloadLimit": "0"}),
    ("uploadLimit", {"uploadLimit": "fast"}),
    ("priority", {"priority": 101}),
    ("priority", {"priority": -1}),
]  # fmt: skip
GROUP: list[tuple[str, Tree]] = [
    ("", {"members": [{"node": "a"}]}),
    ("", {"members": [], "selector": {}}),
    ("", {"size": 3}), ("size", {"size": 1}), ("size", {"size": 17}),
    ("", {"members": [{"node": f"n{at}"} for at in range(17)]}),
    ("members", {"members": [{"node": f"n{at}"} for at in range(65)]}),
    ("", {"members": [{"node": f"n{at}"} for at in range(9)], "backend": "jaccl"}),
    ("", {"members": [{"node": f"n{at}"} for at in range(9)], "backend": "jaccl-ring"}),
    ("members.0.addresses.0", {"members": [{"node": "a", "addresses": ["mac.local"]}]}),
    ("members.0.rdma.b.0", {"members": [{"node": "a", "rdma": {"b": ["en 5"]}}]}),
    ("environment", {"environment": {"MLX_RANK": "0"}}),
    ("port", {"port": 80}), ("port", {"port": 57_001}),
    ("fallbacks.0.size", {"fallbacks": [{"size": 1}]}),
    ("fallbacks.0.model", {"fallbacks": [{"model": "../x"}]}),
    ("members.0.node", {"members": [{"node": "A"}, {"node": "b"}]}),
]  # fmt: skip
ROUTE: list[tuple[str, Tree]] = [
    ("model", {"model": "a b"}),
    ("backends", {"backends": []}),
    ("backends.0.deployment", {"backends": [{"deployment": "Qwen"}]}),
    ("backends.0.weight", {"backends": [{"deployment": "q", "weight": -1}]}),
    ("backends.0.weight", {"backends": [{"deployment": "q", "weight": 1_000_001}]}),
]
NODE: list[tuple[str, Tree]] = [
    ("unschedulable", {"unschedulable": 1}),
    ("taints.0.effect", {"taints": [{"key": "a", "effect": "Never"}]}),
    ("taints.0.key", {"taints": [{"key": "", "effect": "NoSchedule"}]}),
    ("taints", {"taints": [{"key": "a", "value": v, "effect": "NoSchedule"} for v in ("1", "2")]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "field", "change"),
    [
        pytest.param(kind, field, change, id=f"{kind.__name__}-{json.dumps(change)[:60]}")
        for kind, table in (
            (ModelDeployment, DEPLOYMENT),
            (NodePool, POOL),
            (ShardGroup, GROUP),
            (ModelRoute, ROUTE),
            (Node, NODE),
        )
        for field, change in table
    ],
)
def test_bad_values_are_refused_by_name(kind: type[ApiObject], field: str, change: Tree) -> None:
    with pytest.raises(ValidationError) as refused:
        read(kind, GOOD[kind] | change)
    places = [".".join(map(str, error["loc"])) for error in refused.value.errors()]
    assert any(place.startswith(f"spec.{field}".rstrip(".")) for place in places), places
