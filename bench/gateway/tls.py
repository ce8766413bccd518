"""The cost of TLS in our gateway, on and off in one run: to clients, to engines with identities on both sides, and both.

Four gateways with engines in common are loaded in turns. Processor time is the gateway's own; throughput and latency
include the load generator and the engines, which pay for TLS on the same cores. The last line is JSON.
"""

import asyncio
import os
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tabulate import tabulate

from bench.gateway import loading, ours
from bench.gateway.aims import Aim
from bench.gateway.figures import Burst, Results, of_cpu, of_p50, of_p99
from bench.gateway.loading import Load
from bench.gateway.parts import Engine, Programs, compiled, cpu_s, free_port, own_core
from bench.gateway.peers import Peer
from bench.gateway.rounds import Plan, measure
from bench.gateway.workloads import ALONE, KINDS, PACED, STREAM
from bench.result import finish, sized
from identity.authority import Authority, new_key
from identity.folder import IdentityFolder
from identity.names import Identity, Role

PLAIN = "plain"
# Connections are made before a burst; the gateway's share of their handshakes is in its processor time.
CASES = (ALONE, KINDS[0], STREAM, PACED)
PLAN = Plan(*sized((5, 5, 2.0), smoke=(1, 1, 0.2)), CASES)
_HANDSHAKES = sized(400, smoke=20)
LEAST_RATE, MOST_P99_US = 0.85, 200.0


def issue(authority: Authority, path: Path, role: Role, name: str) -> IdentityFolder:
    """Return the folder of a new identity."""
    key, request = new_key()
    identity = Identity(authority.fleet, role, name)
    leaf = authority.sign(request, identity, datetime.now(UTC))
    folder = IdentityFolder(path)
    folder.write_identity(key, leaf.pem)
    folder.write_authorities(authority.pem)
    return folder


def variants(folder: Path, authority: Authority) -> dict[str, ours.Tls]:
    """Return the gateways that are compared."""
    context = ssl.create_default_context(cadata=authority.pem)
    context.check_hostname = False
    tls = ours.Tls(issue(authority, folder / "edge", Role.GATEWAY, "edge").path, context)
    return {
        PLAIN: tls,
        "clients": replace(tls, to_clients=True),
        "engines": replace(tls, to_engines=True),
        "both": replace(tls, to_clients=True, to_engines=True),
    }


def table(results: Results) -> str:
    """Return a table, a row for each gateway in each case."""
    lines = []
    for case in CASES:
        plain_p99_us = results.spread(case, PLAIN, of_p99).median
        for name in (peer.name for peer in results.peers):
            p99_us = results.spread(case, name, of_p99).median
            lines.append(
                (
                    case.name,
                    name,
                    round(results.spread(case, name, _rate).median),
                    f"{results.ratio(case, name, PLAIN, _rate).median:.2f}",
                    round(results.spread(case, name, of_cpu).median),
                    f"{results.ratio(case, name, PLAIN, of_cpu).median:.2f}",
                    round(results.spread(case, name, of_p50).median),
                    round(p99_us),
                    round(p99_us - plain_p99_us),
                )
            )
    heads = ("case", "TLS", "req/s", "ratio", "CPU us", "ratio", "p50 us", "p99 us", "+p99")
    return str(tabulate(lines, headers=heads))


def _rate(burst: Burst) -> float:
    return burst.rate


def aims(results: Results) -> Iterator[Aim]:
    """Yield the aims: the share of the plain throughput, and what TLS adds to the p99 of one client."""
    for name in (peer.name for peer in results.peers if peer.name != PLAIN):
        rate = results.ratio(KINDS[0], name, PLAIN, _rate).median
        yield Aim(f"{name}: throughput over plain", rate, LEAST_RATE, is_least=True)
        share = results.ratio(KINDS[0], PLAIN, name, of_cpu).median
        title = f"{name}: requests per CPU second over plain"
        yield Aim(title, share, LEAST_RATE, is_least=True)
        added_us = results.difference(ALONE, name, PLAIN, of_p99).median
        title = f"{name}: added p99 of one client, us"
        yield Aim(title, added_us, MOST_P99_US, is_least=False)


async def handshake_us(programs: Programs, peer: Peer) -> float:
    """Return the gateway's processor time for the handshake of one client, in microseconds."""
    load = Load(port=peer.port, connections=_HANDSHAKES, seconds=0, is_streamed=False, is_tls=True)
    before_s = cpu_s(peer.pid)
    await loading.run(programs, load)
    return (cpu_s(peer.pid) - before_s) / _HANDSHAKES * 1e6


async def main() -> None:
    """Measure and print."""
    began_s = time.monotonic()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-bench-")))
        programs = compiled(folder, with_tls=True)
        authority = Authority.create(datetime.now(UTC))
        node = issue(authority, folder / "node", Role.NODE, "bench")
        options = (f"identity={node.path}",)
        engines = [Engine(programs, f"bench-{n}", free_port(), options) for n in range(2)]
        with own_core(is_gateway=False):
            for engine in engines:
                engine.start()
                stack.callback(engine.end)
        contenders = []
        for name, tls in variants(folder, authority).items():
            gateway = await ours.start(stack, folder / name, {"bench": engines}, tls=tls)
            peer = Peer(name, gateway.port, gateway.pid, key=ours.KEY, is_tls=tls.to_clients)
            contenders.append(peer)
        print(f"{os.cpu_count()} cores shared by load, gateways, engines and etcd", flush=True)
        results = await measure(programs, engines, contenders, PLAN)
        handshake = await handshake_us(programs, next(one for one in contenders if one.is_tls))
    names = [peer.name for peer in contenders]
    failed = sum(results.failed(name) for name in names)
    if failed or not all(results.is_measured(name, CASES) for name in names):
        sys.exit(
            f"bench gateway tls: {failed} requests failed, or a gateway answered nothing in a case"
        )
    print(table(results))
    print(f"a handshake with a client: {handshake:.0f} us of the gateway's processor time")
    found = list(aims(results))
    for aim in found:
        print(aim)
    figures = {
        f"{case.name}_{name}": {
            "rate": round(results.spread(case, name, _rate).median),
            "cpu_us": round(results.spread(case, name, of_cpu).median, 1),
        }
        for case in CASES
        for name in names
    }
    last = {
        "handshake_us": round(handshake),
        **figures,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    finish("gateway tls", {aim.name: round(aim.value, 3) for aim in found}, last)


if __name__ == "__main__":
    asyncio.run(main())
