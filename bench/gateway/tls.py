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
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tabulate import tabulate

from bench.gateway import loading, ours
from bench.gateway.aims import Aim
from bench.gateway.loading import Load
from bench.gateway.parts import Engine, Programs, compiled, cpu_s, free_port
from bench.gateway.peers import Peer
from bench.gateway.speed import CASES, Row, measure
from bench.result import finish, sized
from identity.authority import Authority, new_key
from identity.folder import IdentityFolder
from identity.names import Identity, Role

PLAIN = "plain"
# Connections are made before a burst; the gateway's share of their handshakes is in its processor time.
BURST_S = sized(2.0, smoke=0.2)
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


def compared(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield each gateway with TLS in a case, and the plain one."""
    plain = {row.case: row for row in rows if row.peer.name == PLAIN}
    for row in rows:
        if row.peer.name != PLAIN:
            yield row, plain[row.case]


def table(rows: Sequence[Row]) -> str:
    """Return a table, a row for each gateway in each case."""
    plain = {row.case: row for row in rows if row.peer.name == PLAIN}
    lines = [
        (
            row.case,
            row.peer.name,
            round(row.rate),
            f"{row.rate / plain[row.case].rate:.2f}",
            round(row.cpu_us),
            f"{row.cpu_us / plain[row.case].cpu_us:.2f}",
            round(row.p50_us),
            round(row.p99_us),
            round(row.p99_us - plain[row.case].p99_us),
            row.failed,
        )
        for row in rows
    ]
    heads = (
        "case",
        "TLS",
        "req/s",
        "ratio",
        "CPU us",
        "ratio",
        "p50 us",
        "p99 us",
        "+p99",
        "failed",
    )
    return str(tabulate(lines, headers=heads))


def aims(rows: Sequence[Row]) -> Iterator[Aim]:
    """Yield the aims: the share of the plain throughput, and what TLS adds to the p99 of one client."""
    for row, plain in compared(rows):
        if row.case == "whole_c64":
            name = f"{row.peer.name}: throughput over plain"
            yield Aim(name, row.rate / plain.rate, LEAST_RATE, is_least=True)
            name = f"{row.peer.name}: requests per CPU second over plain"
            yield Aim(name, plain.cpu_us / row.cpu_us, LEAST_RATE, is_least=True)
        elif row.case == "whole_c1":
            name = f"{row.peer.name}: added p99 of one client, us"
            yield Aim(name, row.p99_us - plain.p99_us, MOST_P99_US, is_least=False)


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
        for engine in engines:
            engine.start()
            stack.callback(engine.end)
        contenders = []
        for name, tls in variants(folder, authority).items():
            gateway = await ours.start(stack, folder / name, {"bench": engines}, tls=tls)
            peer = Peer(name, gateway.port, gateway.pid, key=ours.KEY, is_tls=tls.to_clients)
            contenders.append(peer)
        print(f"{os.cpu_count()} cores shared by load, gateways, engines and etcd", flush=True)
        rows = await measure(programs, engines, contenders, BURST_S)
        handshake = await handshake_us(programs, next(one for one in contenders if one.is_tls))
    print(table(rows))
    print(f"a handshake with a client: {handshake:.0f} us of the gateway's processor time")
    found = list(aims(rows))
    for aim in found:
        print(aim)
    failed = sum(row.failed for row in rows)
    if failed or len(rows) != len(CASES) * len(contenders):
        sys.exit(f"bench gateway tls: {failed} requests failed, {len(rows)} rows")
    figures = {
        f"{row.case}_{row.peer.name}": {"rate": round(row.rate), "cpu_us": round(row.cpu_us, 1)}
        for row in rows
    }
    last = {
        "handshake_us": round(handshake),
        **figures,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    finish("gateway tls", {aim.name: round(aim.value, 3) for aim in found}, last)


if __name__ == "__main__":
    asyncio.run(main())
