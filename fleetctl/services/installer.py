"""Installs and uninstalls services with all changes that they need: each is recorded, then made."""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fleetctl.services.changes import (
    BEST_EFFORT,
    Change,
    ChangeRecord,
    Document,
    Entry,
    FirewallChange,
    ServiceChange,
    key_of,
)
from fleetctl.services.host import Host
from fleetctl.services.layout import Backend, Layout
from fleetctl.services.plan import InstallSettings, desired_changes, sentence, service_spec
from fleetctl.services.port import ServiceError, Services
from machinery import processes
from machinery.clock import Clock
from nodeagent.engines.engine_processes import stop_all

Say = Callable[[str], None]

# A program with a wrong flag or an unusable folder ends within this time.
SETTLE_S: Final = 2.0
_POLL_S: Final = 0.1


class ServiceInstaller:
    """Installs and uninstalls the services of one layout."""

    def __init__(
        self,
        layout: Layout,
        services: Services,
        host: Host,
        clock: Clock,
        *,
        settle_s: float = SETTLE_S,
    ) -> None:
        """`settle_s` is how long a program has to run before it counts as started."""
        self._settle_s = settle_s
        self._layout = layout
        self._services = services
        self._host = host
        self._clock = clock
        self._record = ChangeRecord(layout.home)

    async def preview(self, changes: Sequence[Change]) -> list[Change]:
        """Return those of the changes that would be made now; nothing is written."""
        document = self._record.read()
        return [
            previewed
            for change in changes
            if (previewed := await self._preview(_recorded(document, change) or change)) is not None
        ]

    async def _preview(self, change: Change) -> Change | None:
        try:
            return await self._host.with_old(change)
        except ServiceError:
            if not isinstance(change, BEST_EFFORT):
                raise
            return change

    async def install(self, settings: InstallSettings, say: Say) -> None:
        """Make every change that the service needs, install it and start it; a repeated call finishes a killed one.

        Raises:
            ServiceError: a change is refused, or the program ends at once.

        """
        spec = service_spec(settings)
        with self._locked():
            await self._apply_all(desired_changes(settings), settings.part, settings.backend, say)
            await self._services.install(spec)
            await self._services.start(settings.part)
        await self._check_settled(settings)

    async def apply(self, changes: Sequence[Change], part: str, backend: Backend, say: Say) -> None:
        """Make the changes of a part, without its service; `uninstall` undoes them.

        Raises:
            ServiceError: a change is refused.

        """
        with self._locked():
            rest = [change for change in changes if not isinstance(change, ServiceChange)]
            await self._apply_all(rest, part, backend, say)

    async def _apply_all(
        self, changes: Sequence[Change], part: str, backend: Backend, say: Say
    ) -> None:
        document = self._record.read()
        if document.backend != backend:
            self._record.write(document.model_copy(update={"backend": backend}))
        for change in changes:
            await self._attempt(change, part, say)

    def recorded(self, part: str) -> list[Change]:
        """Return the recorded changes of a part. Raises ServiceError: the record cannot be read."""
        return [entry.change for entry in self._record.read().entries if part in entry.needed_by]

    async def renew_firewall(self, part: str, say: Say) -> None:
        """Let the program of a service through the firewall at its path of today; to be called before it starts.

        The path changes with a release, and with `brew upgrade` of etcd. An earlier path stays allowed, for a way back,
        until it is gone.

        Raises:
            ServiceError: the record cannot be read or written, or another fleetctl changes it.

        """
        entries = [
            (entry, entry.change)
            for entry in self._record.read().entries
            if part in entry.needed_by and isinstance(entry.change, FirewallChange)
        ]
        if not entries:
            return
        with self._locked():
            for entry, change in entries:
                path = str(Path(change.program).resolve()) if change.program else change.path
                if path != change.path:
                    renewed = change.model_copy(update={"path": path, "old": False})
                    await self._attempt(renewed, part, say)
                if not Path(change.path).exists():
                    await self._undo(entry, say, is_purge=False)
                    self._forget(entry, ())

    async def _attempt(self, change: Change, part: str, say: Say) -> None:
        """Record and make a change; a managed Mac may refuse one that is no condition of the service."""
        try:
            await self._apply(change, part, say)
        except ServiceError as error:
            if not isinstance(change, BEST_EFFORT):
                raise
            say(
                f"warning: this Mac refuses to {sentence(change)}: {error}. The service is installed without it; on a managed "
                "Mac, its administrator can change that"
            )

    async def _apply(self, change: Change, part: str, say: Say) -> None:
        """Record a change, then make it. One that is recorded already is made again: its making may have been killed."""
        document = self._record.read()
        entries = list(document.entries)
        pending = await self._host.with_old(change)
        keys = [key_of(entry.change) for entry in entries]
        if key_of(change) in keys:
            number = keys.index(key_of(change))
            # Only what was there before our first change is worth going back to.
            recorded = _with_old_of(change, entries[number].change)
            needed_by = tuple(dict.fromkeys((*entries[number].needed_by, part)))
            entries[number] = Entry(change=recorded, needed_by=needed_by)
        elif pending is not None:
            recorded = pending
            entries.append(Entry(change=recorded, needed_by=(part,)))
        elif isinstance(change, FirewallChange):
            # Allowed by somebody else; the next release has another path, which nobody has allowed.
            recorded = change.model_copy(update={"old": True})
            entries.append(Entry(change=recorded, needed_by=(part,)))
        else:
            return
        if tuple(entries) != document.entries:
            self._record.write(document.model_copy(update={"entries": tuple(entries)}))
        if pending is not None:
            say(sentence(pending))
        await self._host.make(recorded)

    async def uninstall(self, part: str, say: Say, *, is_purge: bool = False) -> bool:
        """Remove a service, and undo the changes that only it needed; return whether there were any.

        Raises:
            ServiceError: a change cannot be undone; the others are still recorded.

        """
        with self._locked():
            document = self._record.read()
            mine = [one for one in document.entries if part in one.needed_by]
            for entry in reversed(mine):
                rest = tuple(one for one in entry.needed_by if one != part)
                if not rest:
                    await self._undo(entry, say, is_purge=is_purge)
                self._forget(entry, rest)
            if not self._record.read().entries:
                self._record.delete()
            return bool(mine)

    async def _undo(self, entry: Entry, say: Say, *, is_purge: bool) -> None:
        try:
            note = await self._host.undo(entry.change, is_purge=is_purge)
        except ServiceError as error:
            if not isinstance(entry.change, BEST_EFFORT):
                raise
            note = f'warning: this Mac refuses to undo "{sentence(entry.change)}": {error}'
        if note:
            say(note)

    async def end_engines(self, part: str, *, grace_s: float) -> int:
        """End the engines that a service has left running; return their number."""
        count = 0
        for entry in self._record.read().entries:
            change = entry.change
            if isinstance(change, ServiceChange) and change.name == part and change.engines:
                count += await stop_all(Path(change.engines), self._clock, grace_s=grace_s)
        return count

    def _forget(self, entry: Entry, needed_by: tuple[str, ...]) -> None:
        document = self._record.read()
        entries: list[Entry] = []
        for one in document.entries:
            if key_of(one.change) != key_of(entry.change):
                entries.append(one)
            elif needed_by:
                entries.append(one.model_copy(update={"needed_by": needed_by}))
        self._record.write(document.model_copy(update={"entries": tuple(entries)}))

    async def _check_settled(self, settings: InstallSettings) -> None:
        """Refuse to call a program that ends at once installed."""
        first = await self._services.state(settings.part)
        deadline = self._clock.monotonic() + self._settle_s
        now = first
        while now.pid is not None and now.pid == first.pid:
            if self._clock.monotonic() >= deadline:
                return
            await self._clock.sleep(_POLL_S)
            now = await self._services.state(settings.part)
        log = service_spec(settings).log
        words = processes.last_lines(log, 1)
        if settings.backend == "systemd":
            words = f"see journalctl -u mlx-fleet-{settings.part}"
        raise ServiceError(
            f"{settings.part} is installed, but its program ends at once: {words or f'see {log}'}"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other installations out: each reads the record, and writes it again."""
        descriptor = os.open(self._layout.root, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise ServiceError(
                "another fleetctl installs or uninstalls services on this machine; try again when it "
                "has ended"
            ) from error
        finally:
            os.close(descriptor)


def installed_parts(document: Document) -> list[str]:
    """Return the names of the services that are recorded."""
    return [
        entry.change.name for entry in document.entries if isinstance(entry.change, ServiceChange)
    ]


def _recorded(document: Document, change: Change) -> Change | None:
    """Return the change with the old value that is recorded for it; None if it is not recorded."""
    for entry in document.entries:
        if key_of(entry.change) == key_of(change):
            return _with_old_of(change, entry.change)
    return None


def _with_old_of(change: Change, recorded: Change) -> Change:
    """Return a change with the old value of an earlier one of the same thing."""
    old = getattr(recorded, "old", None)
    return change.model_copy(update={"old": old}) if "old" in type(change).model_fields else change
