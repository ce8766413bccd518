"""The failure policy of changes that go from Mac to Mac."""

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance import rolling_run
from fleetctl.maintenance.rolling_run import Stage
from fleetctl.remote.errors import RemoteError
from store.errors import UnavailableError

STAGES = (
    Stage(part="gateway", nodes=("a",), concurrency=1),
    Stage(part="nodeagent", nodes=("a", "b", "c", "d"), concurrency=2),
    Stage(part="etcd", nodes=("a", "b"), concurrency=1),
)


async def test_every_mac_is_read_and_each_failure_is_named() -> None:
    nodes: list[str] = []

    async def work(node: str) -> None:
        nodes.append(node)
        if node != "b":
            raise RemoteError(f"{node}.local: no route")

    failures = await rolling_run.for_each(("c", "a", "b"), work)
    assert sorted(nodes) == ["a", "b", "c"]
    assert failures == ["  node/a: a.local: no route", "  node/c: c.local: no route"]


@pytest.mark.parametrize("bad", ["a", "b"])
async def test_nothing_begins_after_a_failure_and_the_same_run_goes_on(bad: str) -> None:
    done: list[tuple[str, str]] = []

    async def work(stage: Stage, node: str) -> None:
        if (stage.part, node) == ("nodeagent", bad):
            raise RemoteError(f"{node}.local: no route")
        done.append((stage.part, node))

    with pytest.raises(FleetctlError) as error:
        await rolling_run.roll(STAGES, work)
    other = "b" if bad == "a" else "a"
    assert done == [("gateway", "a"), ("nodeagent", other)]
    assert error.value.message.splitlines() == [
        "nodeagent failed on 1 of 2 Macs, and nothing else was begun:",
        f"  node/{bad}: {bad}.local: no route",
        "not touched: nodeagent of c, d; etcd of a; etcd of b",
        "Mend what these lines name, and run the same command again: it goes on where it stopped",
    ]


async def test_an_outage_of_the_store_ends_the_run() -> None:
    async def work(stage: Stage, node: str) -> None:
        raise UnavailableError(f"no etcd for {node}")

    with pytest.raises(UnavailableError, match="no etcd for a"):
        await rolling_run.roll(STAGES, work)
