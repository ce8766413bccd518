"""Endpoint filter: which published endpoints a gateway uses. An agent speaks for its own replicas only.

A stolen agent credential can write any endpoint below its own node. Such an endpoint counts only if the reconciler
assigned the replica to that node. One that leads to a socket of the gateway's own machine counts only in the folder
of that node: it could otherwise lead to any program of this machine, such as Docker.

An endpoint with TLS leads to its own node only, whatever its address is: the engine proves the node's identity. In the
fleet's mode strict, other endpoints count only on loopback addresses.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from gateway.routing.table import EngineEndpoint
from gateway.state.build_table import endpoint_of
from identity.credentials import Credentials
from machinery import unix_sockets
from machinery.clock import Clock
from schemas.replica import Endpoint, Replica, publisher_of, unassigned_reason
from schemas.trust import TlsMode
from schemas.wire.engine_address import EngineAddress, is_loopback
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError
from store.informer import Informer
from store.port import Transport

log = logging.getLogger(__name__)

# The longest wait for the first list of replicas. Without it an endpoint would be used for a moment before it is checked.
_FIRST_LIST_S = 1.0
# Interval of the check that replicas may still be read, while endpoints are refused.
_CONFIRM_S, _CONFIRM_TIMEOUT_S = 10.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccess:
    """The engines that this gateway can reach beside those on plain ports."""

    sockets: Path | None = None
    """Folder of the sockets of engines on this machine; None: endpoints with sockets are not used."""
    credentials: Credentials | None = None
    """The gateway's identity; None: engines with TLS cannot be reached."""


class EndpointFilter:
    """Decides which endpoints count. Run `run()` in a task group.

    Fails open: while replicas were never read, every endpoint counts. While the store is away, neither endpoints nor
    replicas change, and so no decision does.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        on_change: Callable[[str | None], None],
        access: EngineAccess,
    ) -> None:
        """`on_change`: called with a replica when the decision about its endpoint may change; None: about any."""
        self._sockets = access.sockets
        self._credentials = access.credentials
        self._mode = None if access.credentials is None else access.credentials.mode
        if access.credentials is not None:
            access.credentials.on_change(self._follow_mode)
        self._transport = transport
        self._clock = clock
        self._on_change = on_change
        self._replicas = Informer(
            transport,
            keys.spec_prefix("Replica"),
            lambda item: publisher_of(codec.decode(Replica, item)),
            clock,
        )
        self._replicas.on_change(lambda key: on_change(key.rpartition("/")[2]))
        self._may_read = True
        """False if the gateway's user lost the right to read replicas."""
        self._used: dict[str, EngineEndpoint] = {}
        self._refused: dict[str, str] = {}
        self._keys: dict[str, set[str]] = {}
        """The keys under which endpoints of a replica are published."""
        self._confirmed_s = -_CONFIRM_S

    def _follow_mode(self) -> None:
        """Decide again when the fleet's TLS mode has changed; the identity's files change more often."""
        assert self._credentials is not None
        if self._credentials.mode is not self._mode:
            self._mode = self._credentials.mode
            log.info("the fleet's TLS mode has changed", extra={"mode": self._mode.value})
            self._on_change(None)

    async def wait_synced(self) -> None:
        """Wait for the first list of replicas, for a moment at most."""
        try:
            async with asyncio.timeout(_FIRST_LIST_S):
                await self._replicas.wait_synced()
        except TimeoutError:
            log.warning(
                "replicas are not read yet; endpoints are used unchecked. If this persists, run `fleetctl init-auth` "
                "again: it lets gateways read them"
            )

    async def run(self) -> None:
        """Follow the replicas, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._replicas.run())
            await self._replicas.wait_synced()
            self._on_change(None)  # a list without replicas sends no change

    async def confirm(self, now_s: float) -> None:
        """Check that replicas may still be read if endpoints are refused. Called every second.

        After the right was withdrawn the cache would stay as it is, and all new endpoints would be refused.
        """
        if not self._refused or now_s - self._confirmed_s < _CONFIRM_S:
            return
        self._confirmed_s = now_s
        may_read = True
        try:
            async with asyncio.timeout(_CONFIRM_TIMEOUT_S):
                await self._transport.get(keys.spec_key("Replica", "-"))
        except PermissionDeniedError:
            may_read = False
        except (StoreError, TimeoutError):
            return
        if may_read != self._may_read:
            self._may_read = may_read
            if not may_read:
                log.warning(
                    "etcd refuses to show replicas; endpoints are used unchecked. Run `fleetctl init-auth` again"
                )
            self._on_change(None)

    @property
    def used(self) -> Mapping[str, EngineEndpoint]:
        """The endpoints that count, by replica. A live view."""
        return self._used

    @property
    def refused(self) -> AbstractSet[str]:
        """The keys of the other endpoints. A live view."""
        return self._refused.keys()

    def filter(self, published: Mapping[str, tuple[Endpoint, int]]) -> None:
        """Decide about all endpoints. `published`: by key, with the revision of the last write."""
        self._used, self._keys = {}, {}
        for key in self._refused.keys() - published.keys():
            del self._refused[key]
        for key, (endpoint, version) in published.items():
            self._keys.setdefault(key.rpartition("/")[2], set()).add(key)
            self._take(key, endpoint, version)

    def update(
        self,
        replicas: Iterable[str],
        changed: Iterable[str],
        find: Callable[[str], tuple[Endpoint, int] | None],
    ) -> None:
        """Decide again about these replicas; `changed` are keys of endpoints, and `find` returns one by its key."""
        for key in changed:
            self._keys.setdefault(key.rpartition("/")[2], set()).add(key)
        for replica in sorted(replicas):  # the log is the same for the same changes
            self._used.pop(replica, None)
            for key in tuple(self._keys.get(replica, ())):
                found = find(key)
                if found is not None:
                    self._take(key, *found)
                    continue
                self._refused.pop(key, None)
                self._keys[replica].discard(key)
            if not self._keys.get(replica):
                self._keys.pop(replica, None)

    def _take(self, key: str, one: Endpoint, version: int) -> None:
        """Use or refuse one endpoint."""
        if one.spec.is_leaving:
            self._refused[key] = "its Mac goes to sleep"
            return
        found = self._decide(key, one, version)
        if isinstance(found, str):
            if self._refused.get(key) != found:
                log.error("endpoint ignored", extra={"key": key, "why": found})
            self._refused[key] = found
            return
        self._refused.pop(key, None)
        before = self._used.get(found.replica)
        # After a replica moved, the previous node may not have withdrawn its endpoint yet.
        if before is None or before.version < found.version:
            self._used[found.replica] = found

    def _decide(self, key: str, one: Endpoint, version: int) -> EngineEndpoint | str:
        """Return the endpoint, or why it does not count."""
        try:
            endpoint = endpoint_of(one, version)
        except ValueError as error:
            return f"its url: {error}"
        reason = (
            self._reason(key, one)
            or self._socket_reason(endpoint)
            or self._tls_reason(endpoint.origin)
        )
        return reason or endpoint

    def _socket_reason(self, endpoint: EngineEndpoint) -> str:
        """Return why an endpoint's socket is not used; empty if it is, or if it has none."""
        path, node, sockets = endpoint.origin.socket, endpoint.node, self._sockets
        if not path:
            return ""
        if sockets is None:
            return (
                f"it leads to a socket on the machine of node {node}: only a gateway there with --engine-sockets can use "
                "it. Start that agent without --engine-sockets if it is another machine"
            )
        folder = unix_sockets.node_folder(sockets, node)
        if Path(path).parent != folder:
            return f"its socket {path} is not in {folder}, the folder of node {node}"
        try:
            unix_sockets.check_private(folder)
        except unix_sockets.SocketFolderError as error:
            return str(error)
        except OSError as error:
            return f"node {node} has no folder {folder} on this machine ({error.strerror}); it runs on another machine"
        return ""

    def _tls_reason(self, origin: EngineAddress) -> str:
        """Return why an endpoint on a port is not used with its kind of connection; empty if it is."""
        if origin.node and self._credentials is None:
            return (
                "its engine serves TLS, and this gateway has no identity: start the gateway with --identity-dir, after "
                "`fleetctl join` or `fleetctl secure`"
            )
        is_strict = self._mode is TlsMode.STRICT
        if origin.node or origin.socket or not is_strict or is_loopback(origin.host):
            return ""
        return (
            "its engine serves plain HTTP, and the fleet's TLS mode is strict. Give the node an identity, and restart "
            "the replicas that it ran before"
        )

    def _reason(self, key: str, endpoint: Endpoint) -> str:
        """Return why an endpoint does not count; empty if it does."""
        name = endpoint.metadata.name
        # Agents may write only below their own node, so the key proves the writer.
        if key != keys.endpoint_key(endpoint.spec.node, name):
            return "it was written below the key of another node"
        if not (self._replicas.synced and self._may_read):
            return ""
        replica_key = keys.spec_key("Replica", name)
        if replica_key in self._replicas.undecodable:
            return ""  # of a newer release
        return unassigned_reason(endpoint, self._replicas.items.get(replica_key))
