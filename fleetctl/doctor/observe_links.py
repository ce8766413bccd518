"""Connections over each cable of this machine to the Mac at its other end, from the address of the cable itself.

The route table may send packets to the other Mac over another network: only a bound source shows what the cable does.
"""

import asyncio
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Final
from urllib.parse import urlsplit

import psutil

from insight.doctor.cable_checks import LinkProbe
from nodeagent.doctor.readers import CONNECT_S, try_connect
from reconciler.groups.fabric import FabricFault, cables_between
from schemas.node import Node

_MAX_LINKS: Final = 64
_AGENT_PORT: Final = 4001
# The other Mac has answered that nothing listens at this address: the cable works.
_REACHED: Final = (errno.ECONNREFUSED, errno.ECONNRESET)


def local_addresses() -> frozenset[str]:
    """Return the addresses of this machine. Raises OSError."""
    return frozenset(
        snicaddr.address for addr in psutil.net_if_addrs().values() for snicaddr in addr
    )


def links_from(nodes: Sequence[Node], here: frozenset[str]) -> Iterator[LinkProbe]:
    """Yield the connections to try: those of nodes that are this machine, over cables with addresses at both ends."""
    reported = [(node.name, node.status) for node in nodes if node.status is not None]
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

    async def probe(link: LinkProbe) -> LinkProbe:
        error = await try_connect(link.target, link.port, source=link.source)
        if error is None or error.errno in _REACHED:
            return link
        if isinstance(error, TimeoutError):
            reason = f"no answer within {CONNECT_S:.0f} s (errno {errno.ETIMEDOUT})"
        else:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            reason += f" (errno {error.errno})"
        return replace(link, error=reason)

    return tuple(await asyncio.gather(*map(probe, islice(links, _MAX_LINKS))))


async def read_links(nodes: Sequence[Node]) -> tuple[LinkProbe, ...]:
    """Return the links of this machine, probed; none where it is no Mac of the fleet with cables."""
    try:
        return await probe_links(links_from(nodes, local_addresses()))
    except OSError:
        return ()
