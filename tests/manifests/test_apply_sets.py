"""Tests of `manifests.apply_sets`, on memory and a real etcd: pruning, kept objects, and kills at any point."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from machinery.clock import SystemClock
from manifests import apply, apply_sets
from manifests.apply import ApplyOptions, ApplyResult, PruneError
from manifests.errors import ManifestErrors
from schemas.deployment import ModelDeployment
from schemas.meta import APPLY_SET, ApiObject, ObjectKey
from schemas.node import Node
from schemas.pools import NodePool
from schemas.route import ModelRoute
from store import codec, keys, objects
from store.errors import FencedError, TooLargeError
from store.port import Put, Transport
from tests.support.manifests_faults import FaultyTransport, InstantClock, lost
from tests.support.manifests_texts import HEAD, deployment, in_pool, pool, read, route
from tests.support.world import with_metadata

CLOCK = SystemClock()
SITE = ApplyOptions(apply_set="site", prune=True)
POOL = ObjectKey("NodePool", "a")
ALL = route() + deployment(rest=in_pool()) + pool()


async def applied(transport: Transport, text: str, options: ApplyOptions = SITE) -> ApplyResult:
    return await apply.apply(transport, read(text) if text else [], CLOCK, options)


def pruned(done: ApplyResult) -> list[str]:
    return [str(key) for key in done.pruned]


async def members(transport: Transport, name: str = "site") -> set[str]:
    return {str(key) for key in (await apply_sets.read_set(transport, name)).members}


async def there(transport: Transport) -> set[str]:
    """Return the names of the objects that are not being deleted."""
    api_objects: list[ApiObject] = []
    for kind in (NodePool, ModelDeployment, ModelRoute, Node):
        api_objects.extend(await objects.list_all(transport, kind))
    return {f"{o.kind}/{o.name}" for o in api_objects if o.metadata.deletion_timestamp is None}


async def revision(transport: Transport) -> int:
    return (await transport.status()).revision


async def test_undeclared_objects_are_pruned_in_order(transport: Transport) -> None:
    await applied(transport, ALL)
    [node_pool] = await objects.list_all(transport, NodePool)
    assert node_pool.metadata.annotations == {APPLY_SET: "site"}
    held = await apply_sets.read_set(transport, "site")
    assert (held.manager, held.members[ObjectKey("NodePool", "studio")]) == (
        "fleetctl",
        node_pool.metadata.uid,
    )
    done = await applied(transport, pool("other"))
    assert pruned(done) == ["ModelRoute/chat", "ModelDeployment/qwen", "NodePool/studio"]
    assert await there(transport) == {"NodePool/other"}
    assert await members(transport) == {"NodePool/other"}


async def test_the_second_apply_of_a_set_writes_nothing(transport: Transport) -> None:
    await applied(transport, ALL)
    before = await revision(transport)
    done = await applied(transport, ALL)
    assert {outcome.result for outcome in done.outcomes} == {"unchanged"}
    assert await revision(transport) == before


async def test_an_empty_set_is_not_stored(transport: Transport) -> None:
    await applied(transport, pool())
    assert pruned(await applied(transport, "")) == ["NodePool/studio"]
    assert await transport.get(keys.named(keys.APPLY_SET_PREFIX, "site")) is None


async def test_without_prune_the_set_only_grows(transport: Transport) -> None:
    await applied(transport, pool())
    options = replace(SITE, prune=False)
    assert pruned(await applied(transport, pool("b"), options)) == []
    assert await members(transport) == {"NodePool/studio", "NodePool/b"}
    assert pruned(await applied(transport, pool("b"))) == ["NodePool/studio"]


async def test_only_allowed_kinds_are_pruned(transport: Transport) -> None:
    await applied(transport, ALL)
    only = replace(SITE, prune_kinds=("ModelRoute",))
    assert pruned(await applied(transport, pool("b"), only)) == ["ModelRoute/chat"]
    assert await members(transport) == {"NodePool/studio", "ModelDeployment/qwen", "NodePool/b"}


async def test_a_dry_run_reports_what_would_happen(transport: Transport) -> None:
    await applied(transport, pool())
    before = await revision(transport)
    done = await applied(transport, pool("b"), replace(SITE, server_dry_run=True))
    assert [(outcome.obj.name, outcome.result) for outcome in done.outcomes] == [("b", "created")]
    assert pruned(done) == ["NodePool/studio"]
    assert await revision(transport) == before


async def test_an_object_recreated_by_others_is_not_in_the_set(transport: Transport) -> None:
    await applied(transport, pool() + pool("b"))
    await transport.commit([], [_made_anew(await _get(transport, NodePool, "studio"))])
    stolen = await _get(transport, NodePool, "b")
    await transport.commit([], [codec.put_spec(apply_sets.assign_to_set(stolen, "other"))])
    assert pruned(await applied(transport, pool("c"))) == []
    assert await there(transport) == {"NodePool/studio", "NodePool/b", "NodePool/c"}
    assert await members(transport) == {"NodePool/c"}


async def _get(transport: Transport, kind: type[ApiObject], name: str) -> ApiObject:
    obj = await objects.get(transport, kind, name)
    assert obj is not None
    return obj


def _made_anew(obj: ApiObject) -> Put:
    return codec.put_spec(with_metadata(obj, uid="another"))


async def test_an_object_belongs_to_one_set_only(transport: Transport) -> None:
    await applied(transport, pool())
    before = await revision(transport)
    other = replace(SITE, apply_set="other")
    with pytest.raises(ManifestErrors) as caught:
        await applied(transport, pool("b") + pool(), other)
    assert str(caught.value) == (
        "standard input:12:9: NodePool/studio: metadata.name: belongs to the apply set site; the apply set other "
        "cannot have it too. Remove it from the manifests of one of them. If it is removed from those of site, the next prune there deletes it, unless another GitSource of the same repository has it"
    )
    assert await revision(transport) == before
    source = ApplyOptions(manager="gitsource/b", apply_set="gitsource.b", force=True)
    with pytest.raises(ManifestErrors, match="belongs to the apply set site"):
        await applied(transport, pool(), source)
    await applied(transport, pool(), replace(other, force=True))
    assert pruned(await applied(transport, pool("c"))) == []
    assert await there(transport) == {"NodePool/studio", "NodePool/c"}


async def test_a_set_belongs_to_one_manager(transport: Transport) -> None:
    await applied(transport, pool(), replace(SITE, manager="gitsource/a"))
    with pytest.raises(ManifestErrors) as caught:
        await applied(transport, pool("b"))
    assert str(caught.value) == (
        "apply set site: is applied by gitsource/a, and not by fleetctl. Choose another name with --applyset, or take the set over with --force-conflicts"
    )


async def test_an_object_in_use_is_kept_and_pruned_later(transport: Transport) -> None:
    await applied(transport, pool() + pool("b"))
    await apply.apply(transport, read(deployment(rest=in_pool())), CLOCK)
    with pytest.raises(PruneError) as caught:
        await applied(transport, pool("c"))
    assert pruned(caught.value.applied) == ["NodePool/b"]
    assert str(caught.value) == (
        "all objects were written; pruning failed: NodePool/studio is used by ModelDeployment/qwen. Change or "
        "delete it first. Not pruned: NodePool/studio. Applying again is safe, and tries again"
    )
    assert await members(transport) == {"NodePool/c", "NodePool/studio"}
    await apply.apply(transport, read(pool("d") + deployment(rest=in_pool("d"))), CLOCK)
    assert pruned(await applied(transport, pool("c"))) == ["NodePool/studio"]


async def test_a_pruned_object_cannot_be_referred_to(transport: Transport) -> None:
    await applied(transport, ALL)
    before = await revision(transport)
    with pytest.raises(ManifestErrors, match="there is no NodePool studio"):
        await applied(transport, deployment(rest=in_pool()))
    assert await revision(transport) == before


async def test_a_route_may_change_its_name(transport: Transport) -> None:
    await applied(transport, ALL)
    done = await applied(transport, ALL.replace("name: chat", "name: talk"))
    assert pruned(done) == ["ModelRoute/chat"]
    assert [route.name for route in await objects.list_all(transport, ModelRoute)] == ["talk"]


async def test_a_node_is_released_and_not_deleted(transport: Transport) -> None:
    cordoned = f"---\n{HEAD}kind: Node\nmetadata: {{name: mac-1, labels: {{a: b}}}}\nspec: {{unschedulable: true}}\n"
    await applied(transport, pool() + cordoned)
    assert pruned(await applied(transport, pool())) == ["Node/mac-1"]
    node = await objects.get(transport, Node, "mac-1")
    assert node is not None
    assert (node.spec.unschedulable, node.metadata.labels) == (False, {})
    assert (node.metadata.annotations, node.metadata.managed_fields) == ({}, ())


async def test_an_annotation_alone_does_not_make_a_member(transport: Transport) -> None:
    claim = f"---\n{HEAD}kind: NodePool\nmetadata: {{name: a, annotations: {{{APPLY_SET}: site}}}}\nspec: {{nodes: [x]}}\n"
    with pytest.raises(ManifestErrors, match=r"is written by fleetctl's verbs\. Remove it"):
        await apply.apply(transport, read(claim), CLOCK)
    # Applying the output of `get -o yaml` does not claim the object either.
    printed = claim.replace("name: a,", "name: a, uid: u,")
    await apply.apply(transport, read(printed), CLOCK)
    assert (await _get(transport, NodePool, "a")).metadata.annotations == {}


class Killed(BaseException):
    """The process died: none of its tasks continue."""


@pytest.mark.parametrize("turn", range(1, 8))
async def test_a_kill_at_any_write_loses_nothing(turn: int) -> None:
    """The next apply completes the rest of any crashed apply."""
    clock = InstantClock()
    store = FaultyTransport(clock)
    await apply.apply(store, read(ALL), clock, SITE)
    so_far = store.commits

    async def die(now: int) -> None:
        if now == so_far + turn:
            raise Killed

    store.after = die
    wanted = read(pool("b") + deployment("new", rest=in_pool("b")))
    with contextlib.suppress(Killed, BaseExceptionGroup):
        await apply.apply(store, wanted, clock, SITE)
    store.after = _alive
    assert await _of_set(store) <= await members(store)
    await apply.apply(store, wanted, clock, SITE)
    assert await there(store) == {"NodePool/b", "ModelDeployment/new"}
    assert await members(store) == {"NodePool/b", "ModelDeployment/new"}


async def _alive(_: int) -> None:
    return


async def _of_set(transport: Transport) -> set[str]:
    api_objects: list[ApiObject] = []
    for kind in (NodePool, ModelDeployment, ModelRoute):
        api_objects.extend(await objects.list_all(transport, kind))
    left = [o for o in api_objects if o.metadata.deletion_timestamp is None]
    return {f"{o.kind}/{o.name}" for o in left if apply_sets.apply_set_of(o) == "site"}


async def test_concurrent_writers_of_one_set_do_not_undo_each_other(transport: Transport) -> None:
    keep = replace(SITE, prune=False)
    await asyncio.gather(*(applied(transport, pool(f"p-{n}"), keep) for n in range(4)))
    assert await members(transport) == {f"NodePool/p-{n}" for n in range(4)}


async def test_a_lost_answer_leads_to_another_read() -> None:
    clock = InstantClock()
    store = FaultyTransport(clock)
    store.after = lost(1)
    await apply_sets.change_set(store, clock, "a", "me", lambda old: {**old, POOL: ""})
    assert (await apply_sets.read_set(store, "a")).members == {POOL: ""}
    assert store.commits == 1


async def test_a_fenced_writer_stops_at_once() -> None:
    clock = InstantClock()
    store = FaultyTransport(clock)

    async def fenced(_: int) -> None:
        raise FencedError("somebody else leads")

    store.before = fenced
    with pytest.raises(FencedError):
        await apply.apply(store, read(pool()), clock, SITE)
    assert store.commits == 1


async def test_the_error_of_a_set_that_is_too_large_says_what_to_do() -> None:
    many = {ObjectKey("NodePool", f"p-{n}" + "x" * 100): "" for n in range(10_000)}
    with pytest.raises(TooLargeError, match="Split the manifests into several sets"):
        await apply_sets.change_set(
            FaultyTransport(InstantClock()), CLOCK, "a", "me", lambda _: many
        )
