"""`fleetctl create` while others write, and the flags that errors name."""

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.writer import create_all
from fleetctl.verbs import create_flags
from schemas.meta import ApiObject
from schemas.pools import NodePool
from store import codec, objects
from tests.support.manifests_faults import FaultyTransport, InstantClock, lost
from tests.support.manifests_texts import pool, read


async def made(shared_transport: FaultyTransport, *texts: str) -> list[str]:
    api_objects: list[ApiObject] = []
    clock = InstantClock()
    await create_all(
        shared_transport, read("".join(texts)), clock, manager="fleetctl", report=api_objects.append
    )
    return [obj.name for obj in api_objects]


async def test_a_lost_answer_still_counts_as_created() -> None:
    shared_transport = FaultyTransport(InstantClock())
    shared_transport.after = lost(1)
    assert await made(shared_transport, pool("a"), pool("b")) == ["a", "b"]
    assert shared_transport.commits == 1


async def test_objects_created_meanwhile_are_not_overwritten() -> None:
    shared_transport = FaultyTransport(InstantClock())
    [theirs] = read(pool("b"))

    async def create(_: int) -> None:
        await shared_transport.quietly([codec.put_spec(theirs.obj)])

    shared_transport.before = create
    with pytest.raises(
        FleetctlError,
        match="another writer created or changed an object meanwhile; not created: NodePool/a, NodePool/b",
    ):
        await made(shared_transport, pool("a"), pool("b"))
    assert await objects.get(shared_transport, NodePool, "a") is None


def test_errors_name_the_flag_of_a_field() -> None:
    flags = {"spec.model.path": "--model", "spec.autoscaling": "--max", "spec": "--spec"}
    found = [
        create_flags.flag_of(path, flags)
        for path in ("spec.model.path", "spec.autoscaling.x", "spec.b[0]", "specs", "")
    ]
    assert found == ["--model", "--max", "--spec", "specs", ""]
