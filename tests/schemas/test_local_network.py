"""EHOSTUNREACH, from a real network without a route: one wording for gateways, agents and doctor."""

import asyncio
import errno
import logging
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.upstream.call import UnreachableError
from gateway.upstream.dialer import Dialer as EngineDialer
from identity.dialer import Dialer
from machinery.clock import SystemClock
from models.hub.digests import BlobDigest
from nodeagent.doctor import macos_facts
from nodeagent.doctor.host_facts import Reach
from nodeagent.engines.health_client import HealthClient
from nodeagent.peers.peer_blobs import HttpPeerBlobs, PeerError
from schemas import local_network
from schemas.wire.engine_address import EngineAddress
from tests.support import netns

HOST = "10.66.77.88"
TEXT = "No route to host"
needs_namespaces = pytest.mark.skipif(not netns.available(), reason="needs network namespaces")


@pytest.mark.parametrize(
    ("error", "host", "platform", "is_explained"),
    [
        (OSError(errno.EHOSTUNREACH, "x"), HOST, "darwin", True),
        (OSError(errno.EHOSTUNREACH, "x"), "mac-2.local", "darwin", True),
        (OSError(errno.EHOSTUNREACH, "x"), HOST, "linux", False),
        (OSError(errno.EHOSTUNREACH, "x"), "127.0.0.1", "darwin", False),
        (OSError(errno.EHOSTUNREACH, "x"), "100.64.0.7", "darwin", False),
        (OSError(errno.EHOSTUNREACH, "x"), "1.1.1.1", "darwin", False),
        (OSError(errno.ECONNREFUSED, "x"), HOST, "darwin", False),
    ],
)
def test_the_remedy_is_for_macs_in_a_local_network(
    error: OSError, host: str, platform: str, is_explained: bool
) -> None:
    text = local_network.failure_text(error, host, platform=platform)
    assert (local_network.REMEDY in text) == is_explained == (local_network.NAME in text)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), "Connection refused"),
        (ssl.SSLError(1, "wrong version"), "wrong version"),
        (socket.gaierror(8, "nodename nor servname provided"), "nodename nor servname"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_errors_of_tls_and_names_keep_their_own_words(error: Exception, text: str) -> None:
    assert text in local_network.failure_text(error, HOST, platform="darwin")


@needs_namespaces
def test_gateways_agents_and_doctor_name_it_alike(caplog: pytest.LogCaptureFixture) -> None:
    address = EngineAddress(HOST, 4100)

    async def work() -> tuple[UnreachableError, PeerError, Reach]:
        with pytest.raises(UnreachableError) as unreachable:
            await EngineDialer(SystemClock()).connect(address, 60.0, asyncio.Protocol)
        blobs, digest = HttpPeerBlobs(Dialer()), BlobDigest("sha256", "0" * 64)
        async with blobs.open():
            with pytest.raises(PeerError) as peer:
                async with blobs.read("mac-2", f"http://{HOST}:4001", digest, 0, 1):
                    pass
        client = HealthClient()
        for _ in range(2):
            assert await client.ask(address, "u1") is None
        await client.close()
        return unreachable.value, peer.value, await macos_facts.connect(HOST, 22)

    with caplog.at_level(logging.WARNING):
        unreachable, peer, reach = netns.without_route(HOST, work)
    assert (str(unreachable), unreachable.outcome) == (TEXT, "no_route")
    assert str(peer) == f"mac-2 at http://{HOST}:4001: {TEXT}"
    assert reach is Reach.UNREACHABLE
    lines = [record for record in caplog.records if record.message == "no route to an engine"]
    assert [vars(record)["why"] for record in lines] == [TEXT]


SCRIPT = f"""
import asyncio, sys
from pathlib import Path
from machinery.clock import SystemClock
from nodeagent.doctor import collector, readers
from nodeagent.doctor.checks import run_checks

async def neighbours():
    return [("{HOST}", 4001)]

async def no_command(argv):
    return "nc: connectx to {HOST} port 4001 (tcp) failed: No route to host" if "-z" in argv else None

async def none():
    return {{}}

agent = readers.AgentKnowledge(engine_pids=tuple, in_flight=none, neighbours=neighbours)
root = Path(sys.argv[1])
scope = readers.CollectionScope(models_dir=root, agent=agent, root=root, home=root)
facts = asyncio.run(collector.collect_facts(scope, SystemClock(), run=no_command, platform="darwin"))
[finding] = [one for one in run_checks(facts) if one.check == "local network"]
Path(sys.argv[2]).write_text(f"{{finding.level}} {{finding.message}} | {{finding.advice}}")
"""


@needs_namespaces
@pytest.mark.parametrize("is_orphan", [True, False])
def test_doctor_tells_an_orphaned_process(tmp_path: Path, is_orphan: bool) -> None:
    """The process that starts it ends at once, or waits; process 1 of a namespace adopts the orphan as launchd does."""
    root, script, result = tmp_path / "root", tmp_path / "doctor.py", tmp_path / "result"
    root.mkdir()
    script.write_text(SCRIPT)
    os.mkfifo(result)
    run = f"{sys.executable} {script} {root} {result}"
    started = f"({run} &);" if is_orphan else f"sh -c '{run}; :' &"
    shell = f"ip link set lo up; ip route add unreachable {HOST}; {started} cat {result}"
    done = subprocess.run(
        ("unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", shell),
        capture_output=True, text=True, check=True, timeout=50,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ("orphaned process" in done.stdout) == is_orphan
    assert done.stdout.startswith("FAIL" if is_orphan else "UNKNOWN"), done.stderr
    if is_orphan:
        assert done.stdout.endswith(f"| {local_network.REMEDY}")
