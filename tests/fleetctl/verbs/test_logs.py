"""The verb `fleetctl logs` with a real agent and a real gateway; the engines' logs are on the agent's disk."""

import asyncio
import json
import signal
import sys
from contextlib import suppress
from datetime import UTC, datetime

import pytest

from nodeagent.engines.engine_logs import new_run
from schemas.deployment import ModelSource
from schemas.meta import ObjectMeta, find_condition
from schemas.node import NodeStatus
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec
from store import codec, keys
from store.port import Transport
from tests.support.fleet import Done, Fleet
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.terminal import terminal
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

LINE = '{"time": "2026-01-01T00:00:00.000+00:00", "message": "starts"}'
LOG = f"{LINE}\nno end of line"


def replica(name: str, *nodes: str) -> Replica:
    """Return a replica that is being deleted, so that no agent starts its engine."""
    proof = MemoryProof(weights_bytes=1, kv_cache_bytes=0, activation_bytes=0, overhead_bytes=0)
    spec = ReplicaSpec(
        deployment=name.rpartition("-")[0], template="t", model=ModelSource(path="nowhere"),
        served_names=("m",), context_length=64, concurrency=1,
        ranks=tuple(RankAssignment(node=node, memory=proof) for node in nodes),
    )  # fmt: skip
    meta = ObjectMeta(
        name=name,
        uid=name,
        generation=1,
        labels={"app": "chat"},
        deletion_timestamp=datetime(2026, 1, 1, tzinfo=UTC),
    )
    return Replica(metadata=meta, spec=spec)


@pytest.fixture(scope="module")
async def fleet(shared: Fleet, transport: Transport) -> Fleet:
    """Return a fleet of an agent and a gateway; two engines have run, the Mac of a third is unreachable."""
    for name in ("bad-0", "bad-1"):
        folder = shared.root / "mac-1" / "engines" / name
        folder.mkdir(parents=True)
        for text in ("starts\ndied\n", LOG) if name == "bad-0" else (LOG,):
            with new_run(folder).open("a") as log:
                log.write(text)
    found = (replica("bad-0", "mac-1"), replica("bad-1", "mac-1"), replica("lost-0", "mac-9"))
    await transport.commit([], [codec.put_spec(one) for one in found])
    shared.start_agent("mac-1")
    shared.start_gateway("--auth", "on")
    await shared.joined(1)

    async def is_registered() -> bool:
        return bool((await transport.list(keys.GATEWAY_LEASE_PREFIX)).items)

    await until_async(is_registered, limit_s=60, what="the gateway")
    return shared


async def logs(fleet: Fleet, *words: str) -> Done:
    """Run `fleetctl logs` in this process, against the fleet's etcd."""
    return await run_fleetctl("logs", *words, "--etcd", str(fleet.etcd.address))


async def status_of(transport: Transport, node: str) -> NodeStatus | None:
    item = await transport.get(keys.status_key("Node", node))
    return None if item is None else codec.decode(NodeStatus, item)


@pytest.mark.ci
async def test_a_log_is_raw_in_a_pipe_and_harmless_at_a_terminal(
    fleet: Fleet, transport: Transport
) -> None:
    folder = fleet.root / "mac-1" / "engines" / "hostile-0"
    folder.mkdir(parents=True)
    new_run(folder).write_text("\x1b[2Jlast words\n")
    one = replica("hostile-0", "mac-1")
    unlabelled = one.model_copy(update={"metadata": one.metadata.model_copy(update={"labels": {}})})
    await transport.commit([], [codec.put_spec(unlabelled)])
    assert (await fleet.ctl("logs", "hostile-0")).out == "\x1b[2Jlast words\n"
    async with terminal("logs", "hostile-0", "--etcd", str(fleet.etcd.address)) as shown:
        assert (await shown.until("words")).endswith("␛[2Jlast words")
        assert await shown.ended() == 0


async def test_the_agent_serves_the_engines_log(fleet: Fleet) -> None:
    done = await fleet.ctl("logs", "bad-0")
    assert (done.code, done.out, done.err) == (0, LOG, "")
    assert (await logs(fleet, "replica/bad-0", "--tail", "1")).out == "no end of line"
    assert (await logs(fleet, "rep/bad-0", "--tail=0")).out == ""
    assert (await logs(fleet, "bad-0", "--tail=-1", "--all-ranks")).out == (
        f"[replica/bad-0/rank-0] {LINE}\n[replica/bad-0/rank-0] no end of line\n"
    )
    assert (await logs(fleet, "bad-0", "--timestamps")).out == (
        f"2026-01-01T00:00:00.000+00:00 {LINE}\n2026-01-01T00:00:00.000+00:00 no end of line\n"
    )
    assert (await logs(fleet, "bad-0", "--since", "5m")).out == ""
    shown = (await logs(fleet, "bad-0", "-o", "text", "--prefix")).out.splitlines()
    at = datetime(2026, 1, 1, tzinfo=UTC).astimezone()
    assert shown == [
        f"[replica/bad-0/rank-0] {at:%Y-%m-%d %H:%M:%S}.000         starts",
        "[replica/bad-0/rank-0] no end of line",
    ]


async def test_the_previous_run(fleet: Fleet) -> None:
    assert (await logs(fleet, "bad-0", "-p")).out == "starts\ndied\n"


async def test_an_agents_log(fleet: Fleet) -> None:
    done = await logs(fleet, "node/mac-1")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert {line["process"] for line in lines} == {"nodeagent"}
    assert "lease held" in [line["message"] for line in lines]
    # The log records its readers.
    assert lines[-1]["message"] == "a log is read"
    assert "@" in lines[-1]["user"]


async def test_timestamps_prefixes_and_a_text(fleet: Fleet) -> None:
    done = await logs(fleet, "node/mac-1", "--timestamps", "--prefix", "--since", "1h")
    assert done.code == 0
    assert done.out
    for line in done.out.splitlines():
        prefix, stamp, text = line.split(" ", 2)
        assert (prefix, stamp) == ("[node/mac-1]", json.loads(text)["time"])
    await logs(fleet, "node/mac-1", "--tail", "1")  # its reading is a line itself
    done = await logs(fleet, "node/mac-1", "--grep", "A LOG is read")
    assert {json.loads(line)["message"] for line in done.out.splitlines()} == {"a log is read"}


async def test_a_gateways_log_needs_no_api_key(fleet: Fleet, transport: Transport) -> None:
    done = await logs(fleet, "gateway")
    assert '"message": "registered"' in done.out, done.err
    (lease,) = (await transport.list(keys.GATEWAY_LEASE_PREFIX)).items
    id_ = lease.key.rpartition("/")[2]
    named = await logs(fleet, f"gateway/{id_}", "--prefix", "--tail", "1")
    assert named.out.startswith(f'[gateway/{id_}] {{"time": ')


async def test_no_ticket_outlives_the_command(fleet: Fleet, transport: Transport) -> None:
    await logs(fleet, "node/mac-1")

    async def none_is_left() -> bool:
        return not (await transport.list(keys.TICKET_PREFIX)).items

    await until_async(none_is_left, what="the end of the tickets")


async def test_one_replica_of_a_deployment_or_all(fleet: Fleet) -> None:
    done = await logs(fleet, "deploy/bad", "--tail", "1")
    assert done.err == "Found 2 replicas, using replica/bad-0\n"
    assert done.out == "no end of line"
    both = await logs(fleet, "md/bad", "--tail", "1", "--all-replicas")
    assert sorted(line.split(" ", 2)[0] for line in both.out.splitlines()) == [
        "[replica/bad-0/rank-0]",
        "[replica/bad-1/rank-0]",
    ]


async def test_an_unreachable_mac_does_not_hide_the_others(fleet: Fleet) -> None:
    done = await logs(fleet, "-l", "app=chat", "--prefix")
    assert done.code == 1
    assert done.err == (
        'error: replica/lost-0/rank-0: nodes "mac-9" not found; did you mean mac-1? '
        "`fleetctl get nodes` lists them\n"
    )
    assert done.out.count("no end of line\n") == 2


async def test_a_log_is_followed_until_ctrl_c(fleet: Fleet) -> None:
    command = ("logs", "-f", "node/mac-1", "--tail", "0", "--etcd", str(fleet.etcd.address))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        # The next access is a new line for the follower; earlier lines are not shown.
        line = b""
        while b"a log is read" not in line:
            await logs(fleet, "node/mac-1", "--tail", "1")
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    line = await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"error: interrupted\n")


async def test_an_agent_without_its_port_still_runs(fleet: Fleet, transport: Transport) -> None:
    first = await status_of(transport, "mac-1")
    assert first is not None
    port = first.agent_url.rpartition(":")[2]
    fleet.start_agent("taken", "--api-port", port)

    async def said() -> NodeStatus | None:
        found = await status_of(transport, "taken")
        has_it = found is not None and find_condition(found.conditions, "ApiServing") is not None
        return found if has_it else None

    status = await until_async(said, limit_s=60, what="what taken says of its port")
    condition = find_condition(status.conditions, "ApiServing")
    assert condition is not None
    assert (status.agent_url, condition.status, condition.reason) == ("", "False", "PortTaken")
    assert condition.message.startswith(f"port {port} on 127.0.0.1: address already in use. ")
    # Its lease exists nevertheless.
    assert await transport.get(keys.node_lease_key("taken")) is not None
    done = await logs(fleet, "node/taken")
    assert done.code == 1
    assert done.err.startswith("error: node/taken: its agent serves no HTTP API: ")
    fleet.kill("taken")


async def test_a_stopped_agent(fleet: Fleet, transport: Transport) -> None:
    fleet.start_agent("gone")

    async def answers() -> NodeStatus | None:
        found = await status_of(transport, "gone")
        return found if found is not None and found.agent_url else None

    found = await until_async(answers, limit_s=60, what="gone's address")
    fleet.kill("gone")
    await fleet.ended("gone")
    done = await logs(fleet, "node/gone")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        f"error: node/gone does not answer at {found.agent_url}: connection refused. Is it running, and can this "
        "machine reach that address?\n"
    )
