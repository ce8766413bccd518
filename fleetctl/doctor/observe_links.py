"""Connections over each cable of this machine to the Mac at its other end, from the address of the cable itself.

The route table may send packets to the other Mac over another network: only a bound source shows what the cable does.
"""

import asyncio
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final
from urllib.parse import urlsplit

import psutil

from insight.doctor.cable_checks import LinkProbe
from reconciler.groups.fabric import FabricFault, cables_between
from schemas.node import Node

_CONNECT_S: Final = 2.0
_MAX_LINKS: Final = 64
_AGENT_PORT: Final = 4001
# The other Mac has answered that nothing listens at this address: the cable works.
_REACHED: Final = (errno.ECONNREFUSED, errno.ECONNRESET)


def local_addresses() -> frozenset[str]:
    """Return the addresses of this machine. Raises OSError."""
    return frozenset(one.address for found in psutil.net_if_addrs().values() for one in found)


def links_from(nodes: Sequence[Node], here: frozenset[str]) -> Iterator[LinkProbe]:
    """Yield the connections to try: those of nodes that are this machine, over cables with addresses at both ends."""
    reported = [(one.name, one.status) for one in nodes if one.status is not None]
    ours = [(name, status) for name, status in reported if status.address in here]
    for own, other in product(ours, reported):
        cables = () if other[0] == own[0] else cables_between(own, other, {})
        for cable in () if isinstance(cables, FabricFault) else cables:
            for source, target in zip(cable.here.addresses, cable.there.addresses, strict=False):
                if source in here:
                    yield LinkProbe(
                        node=own[0],
                        other=other[0],
                        interface=cable.here.interface,
                        source=source,
                        target=target,
                        port=urlsplit(other[1].agent_url).port or _AGENT_PORT,
                    )


async def probe_links(links: Iterable[LinkProbe]) -> tuple[LinkProbe, ...]:
    """Return the links with the error of each; they are tried at the same time."""
    found = [link for link, _ in zip(links, range(_MAX_LINKS), strict=False)]
    return tuple(await asyncio.gather(*map(_probe, found)))


async def _probe(link: LinkProbe) -> LinkProbe:
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(
                link.target, link.port, local_addr=(link.source, 0)
            )
    except TimeoutError:
        return replace(link, error=f"no answer within {_CONNECT_S:.0f} s (errno {errno.ETIMEDOUT})")
    except OSError as error:
        if error.errno in _REACHED:
            return link
        words = os.strerror(error.errno).lower() if error.errno else str(error)
        return replace(link, error=f"{words} (errno {error.errno})")
    writer.close()
    return link


async def read_links(nodes: Sequence[Node]) -> tuple[LinkProbe, ...]:
    """Return the links of this machine, probed; none where it is no Mac of the fleet with cables."""
    try:
        return await probe_links(links_from(nodes, local_addresses()))
    except OSError:
        return ()
