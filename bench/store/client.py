"""Interface of a client that is measured, ours or another's; imports nothing but the schemas and their decoder.

Children that run in the peers' environment import this: what it needs is in `bench.store.peers.OURS`.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from schemas.deployment import ModelDeployment
from store import codec
from store.reads import KeyValue

Decode = Callable[[], Sequence[ModelDeployment]]
Told = Callable[[], None]


class Client(Protocol):
    """A client of etcd, connected."""

    async def put(self, key: str, value: bytes) -> None: ...

    async def get(self, key: str) -> bytes: ...

    async def list(self, prefix: str) -> Decode:
        """Read key, value and revision of all below the prefix; return what decodes the values."""
        ...

    async def watch(self, prefix: str, opened: Told, seen: Told) -> None:
        """Say once that the watch is open, and then each event, until cancelled."""
        ...

    async def inform(self, prefix: str, opened: Told, seen: Told) -> None:
        """Do the same with a cache of decoded objects if the client has one."""
        ...

    async def grant(self, ttl_s: int) -> int: ...

    async def keep_alive(self, lease: int) -> int: ...

    async def revoke(self, lease: int) -> None: ...

    async def close(self) -> None: ...


def vendor(name: str) -> Any:
    """Return a peer's module: it has no types, and our own environment does not have it."""
    return importlib.import_module(name)


def decoder(values: Iterable[bytes]) -> Decode:
    """Return what makes objects of the values, as our own processes do: lists compare clients, not decoders."""
    return lambda: [codec.decode(ModelDeployment, _item(value)) for value in values]


def _item(value: bytes) -> KeyValue:
    return KeyValue(key="", value=value, create_revision=1, mod_revision=1)


def prefix_end(prefix: bytes) -> bytes:
    return prefix[:-1] + bytes([prefix[-1] + 1])
