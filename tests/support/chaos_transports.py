"""The transports of the chaos suite, the default one first."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from store.etcd.adapter import IDLE_S
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.port import Transport

_ADDRESSED: Mapping[str, Callable[[EtcdAddress], EtcdAddress]] = {
    "grpc": lambda address: replace(address, transport="grpc"),
    "http": lambda address: replace(address, transport="http"),
}
WAYS = tuple(_ADDRESSED)
DEFAULT = WAYS[0]


def go(way: str, address: EtcdAddress, *, idle_s: float = IDLE_S) -> Transport:
    """Return a transport to the address over gRPC or HTTP."""
    return connect(_ADDRESSED[way](address), idle_s=idle_s)


@asynccontextmanager
async def going(
    way: str, address: EtcdAddress, *, idle_s: float = IDLE_S
) -> AsyncIterator[Transport]:
    """Open a transport for the block, and close it even if the block fails: later tests depend on it."""
    transport = go(way, address, idle_s=idle_s)
    try:
        yield transport
    finally:
        await transport.close()
