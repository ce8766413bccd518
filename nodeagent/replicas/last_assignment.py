"""The last assignment of a node, on its disk: the replicas that its agent serves when it starts without the store.

Ranks of shard groups are never among them: their epoch may be over (docs/adr/0005-engines-are-child-processes.md).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

import orjson
from typing_extensions import override

from machinery.clock import Clock
from machinery.files import write_atomically
from nodeagent.engines import group_launch
from nodeagent.kept_copies import CacheView
from nodeagent.replicas.node_replicas import NodeReplicas
from schemas.replica import Replica
from store import codec, keys
from store.informer import Informer
from store.port import KeyValue

log = logging.getLogger(__name__)

ALONE_AFTER_S: Final = 10.0
"""The time for which an agent that starts waits for the store before it serves its last assignment."""
MAX_AGE: Final = timedelta(days=7)
"""The age from which on an assignment is not served: by then its replicas have long been placed elsewhere."""
# A clock that is corrected at the start of a Mac may go back a little.
_CLOCK_STEP: Final = timedelta(minutes=5)
# How often the file notes that the store still says the same.
_CONFIRM_S = 600.0
_FORMAT = 1
_MAX_BYTES = 16 << 20


class AssignmentError(ValueError):
    """The file cannot be used; the message says why."""


class LastAssignment(Protocol):
    """The port to the last assignment."""

    def stand_alone(self) -> int:
        """Serve the last assignment until the store answers; return the number of its replicas."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentFile:
    """The file in the agent's state folder. `node` and `uid` are those of its node."""

    path: Path
    node: str
    uid: str

    def save(self, replicas: Iterable[Replica], confirmed_at: datetime) -> None:
        """Replace the file; `confirmed_at` is the last time at which the store said so.

        Raises:
            OSError: it was not written.

        """
        tree = {
            "format": _FORMAT,
            "node": self.node,
            "uid": self.uid,
            "confirmedAt": confirmed_at.isoformat(),
            "replicas": {
                replica.name: [
                    int(replica.metadata.resource_version),
                    codec.encode_spec(replica).decode(),
                ]
                for replica in replicas
            },
        }
        write_atomically(self.path, orjson.dumps(tree).decode())

    def read(self, now: datetime) -> dict[str, Replica]:
        """Return the replicas by key.

        Raises:
            AssignmentError: there is no file, or it is damaged, of another node or too old.

        """
        try:
            with self.path.open("rb") as file:
                tree = orjson.loads(file.read(_MAX_BYTES))
            self._check(tree, now)
            found = (
                codec.decode_object(
                    Replica,
                    KeyValue(keys.spec_key("Replica", name), text.encode(), version, version),
                )
                for name, (version, text) in tree["replicas"].items()
            )
            return {
                keys.spec_key("Replica", replica.name): replica
                for replica in found
                if is_kept(replica, self.node)
            }
        except FileNotFoundError:
            raise AssignmentError(
                "nothing was assigned to this node yet. To serve this Mac's models without a fleet, stop the agent and run "
                "`fleetctl up`"
            ) from None
        except AssignmentError:
            raise
        except (OSError, codec.UndecodableError) as error:
            raise AssignmentError(str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AssignmentError(f"it is garbled ({type(error).__name__})") from error

    def _check(self, tree: dict[str, object], now: datetime) -> None:
        if tree["format"] != _FORMAT:
            raise AssignmentError(
                f"it has format {tree['format']}, and this release reads {_FORMAT}"
            )
        if (tree["node"], tree["uid"]) != (self.node, self.uid):
            raise AssignmentError(f"it is of the node {tree['node']} with another identity or name")
        confirmed_at = datetime.fromisoformat(str(tree["confirmedAt"]))
        age = now - confirmed_at
        if age > MAX_AGE:
            raise AssignmentError(
                f"the store confirmed it last at {confirmed_at:%Y-%m-%d %H:%M} UTC, more than {MAX_AGE.days} days ago"
            )
        if age < -_CLOCK_STEP:
            raise AssignmentError(
                "it is from the future, so the clock is wrong and its age unknown"
            )


def is_kept(replica: Replica, node: str) -> bool:
    """Return whether the replica may be served without the store: whole, wanted, and assigned to the node."""
    spec = replica.spec
    is_wanted = replica.metadata.deletion_timestamp is None and spec.formation is None
    return is_wanted and group_launch.rank_of_node(replica, node) is not None


class AssignedReplicas(CacheView[Replica]):
    """A cache of replicas (`ObjectCache`) that can show the last assignment until the store has answered."""

    def __init__(
        self, store: NodeReplicas | Informer[Replica], file: AssignmentFile, clock: Clock
    ) -> None:
        super().__init__(store)
        self._file = file
        self._clock = clock
        self._last: Mapping[str, Replica] = {}
        """The last assignment, if it is served."""
        self._saved: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._complaint = ""
        store.on_change(self._note_change)

    @property
    def items(self) -> Mapping[str, Replica]:
        return self._cache.items if self._cache.synced else self._last

    @override
    def on_change(self, handler: Callable[[str], None]) -> None:
        super().on_change(handler)
        self._cache.on_change(handler)

    def stand_alone(self) -> int:
        """Serve the last assignment until the store answers; return the number of its replicas."""
        try:
            self._last = self._file.read(self._clock.now())
        except AssignmentError as error:
            log.warning(
                "the store does not answer, and the last assignment cannot be served",
                extra={"path": str(self._file.path), "why": str(error)},
            )
            return 0
        log.warning(
            "the store does not answer; serving the last assignment",
            extra={"replicas": len(self._last)},
        )
        for key in self._last:
            self._tell(key)
        return len(self._last)

    async def run(self) -> None:
        """Keep the cache in sync, and the file up to date."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._cache.run())
            group.create_task(self._keep())

    async def _keep(self) -> None:
        await self._cache.wait_synced()
        # The store's first list tells of the replicas that it has, and not of those that were withdrawn.
        for key in [key for key in self._last if key not in self._cache.items]:
            self._tell(key)
        self._last = {}
        while True:
            self._changed.clear()
            await self._save()
            try:
                async with asyncio.timeout(_CONFIRM_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _save(self) -> None:
        replicas = {k: one for k, one in self._cache.items.items() if is_kept(one, self._file.node)}
        age = timedelta(seconds=self._cache.staleness_s() or 0.0)
        confirmed_at = self._clock.now() - age
        # Before the file is written: a replica may be withdrawn meanwhile.
        self._saved = frozenset(replicas)
        try:
            await asyncio.to_thread(self._file.save, tuple(replicas.values()), confirmed_at)
        except OSError as error:
            if str(error) != self._complaint:
                log.warning(
                    "the assignment is not saved for a start without the store",
                    extra={"path": str(self._file.path), "why": str(error)},
                )
            self._complaint = str(error)
            return
        self._complaint = ""

    def _note_change(self, key: str) -> None:
        item = self._cache.items.get(key)
        if key in self._saved or (item is not None and is_kept(item, self._file.node)):
            self._changed.set()
