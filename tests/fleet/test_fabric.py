"""The cables of a group, tested by the agents of its Macs: figures, a condition, and nothing left behind."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from nodeagent.fabric.rank_process import FABRIC_MODULE
from store import keys
from store.etcd.connect import connect
from tests.support.fleet import Fleet
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.ci, pytest.mark.etcd, pytest.mark.timeout(180)]
GROUP = """
apiVersion: fleet/v1alpha1
kind: ShardGroup
metadata: {name: pair}
spec:
  members: [{node: mac-1}, {node: mac-2}]
  parallelism: Tensor
"""
# Longer than any test waits: whoever sees it end ended it.
ENDLESS = ("--sizes", "1M", "--rounds", "10000")


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Return two agents and a group of them; nobody reconciles, for nothing is to be placed."""
    root = tmp_path_factory.mktemp("fabric")
    found = Fleet(root / "fleet", root / "models")
    try:
        await found.etcd.start()
        for name in ("mac-1", "mac-2"):
            found.start_agent(name)
        await found.joined(2)
        await found.applied(GROUP)
        yield found
    finally:
        await found.stop()


def ranks(fleet: Fleet) -> list[psutil.Process]:
    """Return the processes that test cables for this fleet, by rank."""
    found = []
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
            is_alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if is_alive and FABRIC_MODULE in argv and any(str(fleet.root) in word for word in argv):
            found.append((argv[argv.index("--rank") + 1], process))
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


async def nothing_left(fleet: Fleet) -> None:
    """See that processes, keys and files of tests go."""
    transport = connect(fleet.etcd.address)

    async def is_gone() -> bool:
        said = await transport.list(keys.FABRIC_RANK_PREFIX)
        tests = await transport.list(keys.FABRIC_TEST_PREFIX)
        files = [*fleet.root.glob("*/fabric/*")]
        return not (said.items or tests.items or files or ranks(fleet))

    try:
        await until_async(is_gone, limit_s=30, what="the end of all that a test leaves")
    finally:
        await transport.close()


async def condition(fleet: Fleet, node: str) -> dict[str, str]:
    done = await fleet.ctl("get", "node", node, "-o", "json")
    conditions = json.loads(done.out)["status"].get("conditions", [])
    return next((one for one in conditions if one["type"] == "FabricHealthy"), {})


async def test_a_group_is_measured(fleet: Fleet) -> None:
    done = await fleet.ctl(
        "fabric", "bench", "pair", "--sizes", "4K,1M", "--rounds", "3", "-o", "json"
    )
    assert done.code == 0, done.err + fleet.words()
    result = json.loads(done.out)
    assert (result["about"], result["backend"], result["isHealthy"]) == (
        "shardgroup/pair",
        "ring",
        True,
    )
    assert [(one["size"], one["rounds"], one["wrong"]) for one in result["sizes"]] == [
        (4096, 3, 0),
        (2**20, 3, 0),
    ]
    assert all(0 < one["leastUs"] <= one["medianUs"] <= one["mostUs"] for one in result["sizes"])
    assert [(one["rank"], one["node"], one["state"]) for one in result["ranks"]] == [
        (0, "mac-1", "Done"),
        (1, "mac-2", "Done"),
    ]
    await nothing_left(fleet)
    for node in ("mac-1", "mac-2"):

        async def is_told(node: str = node) -> bool:
            return (await condition(fleet, node)).get("status") == "True"

        await until_async(is_told, what=f"the condition of {node}")
        assert (await condition(fleet, node))[
            "message"
        ] == "shardgroup/pair: sums are right over ring"


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_rank_that_is_lost_ends_the_test(fleet: Fleet, lost: int) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(fleet.ctl("fabric", "bench", "pair", *ENDLESS, limit_s=90))
        await until(lambda: running.done() or len(ranks(fleet)) == 2, what="ranks")
        there = ranks(fleet)
        assert len(there) == 2, running
        there[lost].send_signal(signal.SIGKILL)
        done = await running
    assert done.code == 1
    assert "error: the test failed: rank" in done.err
    await nothing_left(fleet)


async def test_one_test_of_a_group_at_a_time_and_none_after_ctrl_c(fleet: Fleet) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", "fabric", "bench", "pair", *ENDLESS),
        *("--etcd", str(fleet.etcd.address)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await until(lambda: len(ranks(fleet)) == 2, what="ranks")
        second = await fleet.ctl("fabric", "bench", "pair")
        assert second.code == 1
        assert "a test of shardgroup/pair is already running" in second.err
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert b"Traceback" not in err, err
    await nothing_left(fleet)


async def test_what_killed_commands_and_agents_leave_goes(fleet: Fleet) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", "fabric", "bench", "pair", *ENDLESS),
        *("--etcd", str(fleet.etcd.address)),
    )
    try:
        there = await until(
            lambda: found if len(found := ranks(fleet)) == 2 else None, what="ranks"
        )
        fleet.kill("mac-2")
        # Its standard input was the agent's to keep open.
        await until(
            lambda: not there[1].is_running() or there[1].status() == psutil.STATUS_ZOMBIE,
            what="its end",
        )
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await fleet.ended("mac-2")
        fleet.restart("mac-2")
    await nothing_left(fleet)
    # The lease of the one that was killed is over by then: these are those of now.
    await fleet.joined(2)
