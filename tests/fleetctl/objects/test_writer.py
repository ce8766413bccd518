"""Edits of objects under concurrent writes and lost answers; the reasons of replicas that stay on a draining node."""

import pytest
from typing_extensions import override

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import writer
from fleetctl.verbs import drain_progress
from insight import actions, edits
from insight.actions import Action
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import RESTARTED_AT, ObjectMeta
from schemas.node import Node
from store import codec, objects
from store.errors import ConflictError, EditRefusedError, UnavailableError
from store.port import Delete
from tests.support.manifests_faults import FaultyTransport, InstantClock, lost
from tests.support.reconciler_agents import node_status
from tests.support.world import NOW, deployment, replica, revision

JOINED = Node(metadata=ObjectMeta(name="a", uid="u"), status=node_status("a"))


@pytest.fixture
def transport() -> FaultyTransport:
    return FaultyTransport(InstantClock())


async def there(transport: FaultyTransport, name: str = "a") -> Node:
    obj = await objects.get(transport, Node, name)
    assert obj is not None
    return obj


async def change(transport: FaultyTransport, node: Node = JOINED) -> bool:
    written = await writer.write_edit(transport, InstantClock(), node, actions.EDITS["cordon"])
    return written.is_changed


async def test_the_reconciler_creates_the_node_meanwhile(transport: FaultyTransport) -> None:
    async def register(turn: int) -> None:
        if turn == 1:
            spec = Node(metadata=ObjectMeta(name="a", uid="theirs", generation=1))
            await transport.quietly([codec.put_spec(spec)])

    transport.before = register
    assert await change(transport)
    node = await there(transport)
    assert (node.metadata.uid, node.spec.unschedulable) == ("theirs", True)


async def test_a_lost_answer_does_not_repeat_the_edit(transport: FaultyTransport) -> None:
    transport.after = lost(1)
    assert await change(transport)
    assert (await there(transport)).metadata.generation == 2
    assert transport.commits == 1
    [entry] = (await there(transport)).metadata.managed_fields
    assert (entry.manager, entry.fields) == ("fleetctl-cordon", ("spec.unschedulable",))
    assert not await change(transport)
    dry = await writer.write_edit(
        transport, InstantClock(), JOINED, actions.EDITS["cordon"], is_dry=True
    )
    assert dry.is_changed
    assert transport.commits == 1


async def test_no_answer_is_an_error(transport: FaultyTransport) -> None:
    async def refuse(_: int) -> None:
        raise UnavailableError("nobody there")

    transport.before = refuse
    with pytest.raises(UnavailableError, match="nobody there"):
        await change(transport)


async def test_a_deleted_object_is_an_error(transport: FaultyTransport) -> None:
    with pytest.raises(FleetctlError, match="node/a is gone: it was deleted meanwhile"):
        await change(transport, JOINED.model_copy(update={"status": None}))


class Restless(FaultyTransport):
    """A store in which the node's spec exists only while another writer creates it."""

    @override
    async def get(self, key: str) -> None:
        await self.quietly([Delete(key=key)])


async def test_a_node_that_is_created_and_deleted_repeatedly() -> None:
    transport = Restless(InstantClock())

    async def come(_: int) -> None:
        await transport.quietly([codec.put_spec(Node(metadata=ObjectMeta(name="a")))])

    transport.before = come
    with pytest.raises(ConflictError, match="node/a is created and deleted repeatedly"):
        await change(transport)


async def test_a_restart_with_a_lost_answer_happens_once(transport: FaultyTransport) -> None:
    await transport.quietly([codec.put_spec(deployment())])
    transport.after = lost(1)
    clock, before = InstantClock(), await objects.get(transport, ModelDeployment, "qwen")
    assert before is not None
    restart = await actions.edit_of(transport, clock, before, Action(verb="restart", name="qwen"))
    assert (await writer.write_edit(transport, clock, before, restart)).is_changed
    obj = await objects.get(transport, ModelDeployment, "qwen")
    assert obj is not None
    assert obj.metadata.annotations == {RESTARTED_AT: "2026-01-01T00:00:00Z"}
    assert obj.metadata.generation == 2
    with pytest.raises(EditRefusedError, match="was restarted within the last second"):
        edits.as_restarted(obj, clock.now())
    with pytest.raises(EditRefusedError, match="is already paused"):
        edits.as_paused(edits.as_paused(obj))


def test_revisions_of_a_deployment() -> None:
    first = deployment()
    again = edits.as_restarted(first, NOW)
    stranger = revision(first).model_copy(
        update={"metadata": revision(deployment(name="x")).metadata}
    )
    assert edits.revisions_of([revision(again, 2), stranger, revision(first)], first) == [
        revision(first),
        revision(again, 2),
    ]


def served(ready: int, **spec: object) -> dict[str, ModelDeployment]:
    made = deployment(replicas=2, min_available=2)
    status = ModelDeploymentStatus(ready_replicas=ready)
    return {"qwen": made.model_copy(update={"status": status, **spec})}


def test_reasons_of_remaining_replicas() -> None:
    mine, ending = replica(0).replica, replica(0, is_deleting=True).replica
    lacks = {"qwen": "0/1 nodes fit: 1 draining"}
    assert drain_progress.remaining_reason(ending, served(2), lacks, {}).startswith(
        "it is draining: its requests"
    )
    assert (
        drain_progress.remaining_reason(mine, {}, {}, {})
        == "its deployment qwen is gone, and it will be ended"
    )
    assert drain_progress.remaining_reason(mine, served(2), {}, {}) == (
        "its replacement is not ready yet: 2 of 2 replicas of modeldeployment/qwen are ready"
    )
    fetching = {"qwen": "qwen-1 on b: Downloading: 35 %"}
    assert drain_progress.remaining_reason(mine, served(2), {}, fetching).endswith(
        "are ready; qwen-1 on b: Downloading: 35 %"
    )
    assert drain_progress.remaining_reason(mine, served(3), lacks, {}) == (
        "no node accepts a replacement (0/1 nodes fit: 1 draining)"
    )
    assert drain_progress.remaining_reason(mine, served(2), lacks, {}) == (
        "no node accepts a replacement (0/1 nodes fit: 1 draining), and minAvailable is 2 with 2 of 2 "
        "replicas ready. Free memory on other nodes, or lower spec.minAvailable"
    )


@pytest.mark.parametrize(
    ("ready", "leaving_", "stuck"),
    [(2, 1, 1), (2, 2, 2), (3, 1, 0), (3, 2, 1), (1, 1, 1), (0, 1, 1)],
)
def test_replicas_blocked_by_min_available(ready: int, leaving_: int, stuck: int) -> None:
    assert drain_progress.count_blocked(served(ready)["qwen"], leaving_) == stuck
