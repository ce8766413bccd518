"""Deleting a deployment: what it owns ends first, or is left running and taken over later."""

from dataclasses import replace

from reconciler.plan import plan
from reconciler.views import DeploymentView, ReplicaView
from schemas.deployment import ModelDeployment
from schemas.meta import ORPHAN
from tests.support.fleets import deployment, node, observed, replica
from tests.support.reconciler_shorthand import short

A = node("a")


def orphaning() -> ModelDeployment:
    found = deployment(is_deleting=True)
    metadata = found.metadata.model_copy(update={"finalizers": (ORPHAN,)})
    return found.model_copy(update={"metadata": metadata})


def orphan(ordinal: int, *, is_deleting: bool = False, is_outdated: bool = False) -> ReplicaView:
    found = replica(ordinal, is_deleting=is_deleting, is_outdated=is_outdated)
    metadata = found.replica.metadata.model_copy(update={"owner_references": ()})
    return replace(found, replica=found.replica.model_copy(update={"metadata": metadata}))


def planned(seen: DeploymentView) -> list[str]:
    return [short(action) for action in plan(seen).actions]


def test_orphaned_replicas_are_let_go_before_their_deployment_goes() -> None:
    assert planned(observed(orphaning(), (replica(0),), (A,))) == ["oqwen-0"]
    assert planned(observed(orphaning(), (orphan(0),), (A,))) == ["Xqwen"]


def test_what_drains_already_ends_also_when_orphaned() -> None:
    draining = replica(0, is_deleting=True)
    assert planned(observed(orphaning(), (draining, orphan(1)), (A,))) == []
    ended = replace(draining, is_stopped=True)
    assert planned(observed(orphaning(), (ended, orphan(1)), (A,))) == ["xqwen-0"]


def test_an_orphan_is_left_alone_until_somebody_deletes_it() -> None:
    assert planned(observed(None, (orphan(0),), (A,))) == []
    gone = replace(orphan(0, is_deleting=True), is_stopped=True)
    assert planned(observed(None, (gone,), (A,))) == ["xqwen-0"]


def test_a_deployment_of_the_name_takes_over_what_is_there() -> None:
    assert planned(observed(deployment(), (orphan(0),), (A,))) == ["aqwen-0"]
    # Then it is one of its own, and rolls if it is outdated.
    assert planned(observed(deployment(), (replica(0, is_outdated=True),), (A,))) == ["+qwen-1@a"]


def test_what_lost_its_owner_otherwise_ends() -> None:
    stranger = replace(replica(0), is_ours=False)
    assert planned(observed(None, (stranger,), (A,))) == ["-qwen-0 OwnerDeleted"]
