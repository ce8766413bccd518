"""Pinned prefixes of a deployment: what they exclude, their memory, and their condition from engine to replica."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from nodeagent.execute import engine_order
from nodeagent.replicas.observation import ObservedEngine, ObservedReplica
from nodeagent.status import replica_conditions
from reconciler.deployments.rollout.revisions import content_of
from reconciler.deployments.status import replica_status
from reconciler.placement.inputs import request_for
from reconciler.placement.memory_proof import proof_of
from schemas.deployment import ModelDeploymentSpec
from schemas.prefixes import PinnedPrefix
from schemas.replica import RankStatus
from schemas.wire.engine_config import PrefixFile
from tests.support.world import NOW, condition_of, deployment, node, replica

ONE = {"name": "agent", "file": "prefixes/agent.json", "tokens": 1000}
PINNED = PinnedPrefix.model_validate(ONE)


@pytest.mark.parametrize(("fields", "words"), [
    ({"prefixes": [ONE, ONE]}, "two prefixes with one name: agent, agent; rename one"),
    ({"kvCache": {"window": 64}}, "prefixes and kvCache.window"),
    ({"kvCache": {"prefixBytes": "0"}}, "prefixes and kvCache.prefixBytes: 0"),
    ({"sharding": "Auto"}, "prefixes and sharding: Auto"),
    ({"contextLength": 1000}, "tokens: 1000, which must be less than contextLength, 1000"),
    ({"prefixes": [ONE | {"file": "../secret.json"}]}, "must not contain '..'"),
    ({"prefixes": [{"name": "agent", "file": "a.json"}]}, "tokens"),
])  # fmt: skip
def test_what_does_not_go_with_prefixes_is_refused(fields: dict[str, Any], words: str) -> None:
    document = {"model": {"path": "m"}, "prefixes": [ONE], **fields}
    with pytest.raises(ValidationError) as refused:
        ModelDeploymentSpec.model_validate_json(json.dumps(document))
    assert words in str(refused.value)


def test_the_proof_has_the_bytes_of_the_tokens() -> None:
    plain, pinned = deployment(), deployment(prefixes=(PINNED,))
    before, after = (proof_of(request_for(one), node("a")) for one in (plain, pinned))
    token_bytes = before.kv_cache_bytes // (plain.spec.context_length * before.concurrency)
    # Caches grow in steps of 256 tokens, and each block of 64 has 2 KiB of its own.
    assert after.prefix_cache_bytes == 1024 * token_bytes + 1000 * 32
    assert after.total_bytes == before.total_bytes + after.prefix_cache_bytes


def test_the_engine_gets_the_files_below_the_models_folder(tmp_path: Any) -> None:
    assert content_of(deployment(prefixes=(PINNED,))).prefixes == (PINNED,)
    placed = replica(0).replica
    placed = placed.model_copy(
        update={"spec": placed.spec.model_copy(update={"prefixes": (PINNED,)})}
    )
    wanted = PrefixFile(name="agent", path=tmp_path / "prefixes/agent.json", tokens=1000)
    assert engine_order(placed, tmp_path).config.prefixes == (wanted,)


@pytest.mark.parametrize(
    ("reason", "status"), [("Pinned", "True"), ("NotPinned", "False"), ("ReadingPrefixes", "False")]
)
def test_a_replica_has_the_condition_of_its_engine(reason: str, status: str) -> None:
    view = replica(0)
    placed = view.replica
    engine = ObservedEngine(
        replica_uid=placed.metadata.uid, is_running=True, state="Ready", prefixes=(reason, "words")
    )
    conditions = replica_conditions(ObservedReplica(replica=placed, engine=engine))
    report = RankStatus(replica_uid=placed.metadata.uid, node="a", conditions=conditions)
    shown = replica_status(view, [report], old=None, now=NOW)
    assert condition_of(shown, "PrefixesPinned") == (status, reason, "words")
    without = replace(engine, prefixes=("", ""))
    none = replica_conditions(ObservedReplica(replica=placed, engine=without))
    assert all(condition.type != "PrefixesPinned" for condition in none)
