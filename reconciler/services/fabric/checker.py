"""The leader's task that runs due checks of the cables of ShardGroups, one at a time in the whole fleet.

It never uses the cables of a group with a replica. Results wait here until the group's status holds them; if the
leader ends before that, the check is still due and runs again.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from machinery.clock import Clock
from reconciler.groups import fabric_checks
from reconciler.groups.fabric import FabricFault, assign_seats
from reconciler.groups.fabric_checks import FabricCheckView
from reconciler.listers.lister import Lister
from reconciler.services.fabric.runs import (
    FabricTestBusyError,
    FabricTestError,
    make_test,
    run_test,
)
from schemas.fabrictest import QUICK_SIZES, FabricRank
from schemas.formation import Seat
from schemas.meta import ObjectKey
from schemas.shardgroup import FabricCheck, ShardGroup, ShardGroupStatus
from store.codec import UndecodableError
from store.errors import PermissionDeniedError, StoreError, UnavailableError
from store.port import Guard, Transport

log = logging.getLogger(__name__)

_PERIOD_S: Final = 5.0
# A replica that is placed on the group ends the check this soon.
_WATCH_S: Final = 0.2
_ROUNDS: Final = 5


class FabricChecker:
    """Runs the checks. Needs leadership; `run()` runs for as long."""

    def __init__(
        self,
        lister: Lister,
        transport: Transport,
        clock: Clock,
        *,
        fence: Callable[[], Guard],
        on_change: Callable[[ObjectKey], None],
    ) -> None:
        """`fence` guards what is written; `on_change` gets each group whose view changed."""
        self._lister = lister
        self._transport = transport
        self._clock = clock
        self._fence = fence
        self._on_change = on_change
        self._views: dict[str, FabricCheckView] = {}

    def view(self, group: ShardGroup) -> FabricCheckView:
        """Return what the group's status must take over."""
        return self._views.get(group.metadata.uid, FabricCheckView())

    async def run(self) -> None:
        """Run due checks forever."""
        while True:
            groups = self._lister.groups()
            known = {shard_group.metadata.uid for shard_group in groups}
            self._views = {uid: view for uid, view in self._views.items() if uid in known}
            for group in groups:
                await self._check_if_due(group)
            await self._clock.sleep(_PERIOD_S)

    async def _check_if_due(self, group: ShardGroup) -> None:
        history, now = self._history(group), self._clock.now()
        finished = self.view(group).finished
        if finished is not None and finished not in history:
            return  # the status is not written yet
        due_at = fabric_checks.next_check_at(group, history, now)
        if due_at is None or due_at > now:
            self._set_view(group, FabricCheckView())
            return
        waits_for = self._user_of(group)
        seats = self._seats(group)
        if not waits_for and isinstance(seats, str):
            waits_for = seats
        if waits_for or isinstance(seats, str):
            self._set_view(group, FabricCheckView(waits_for=waits_for))
            return
        view = await self._check(group, seats, history)
        if view is not None:
            self._set_view(group, view)

    def _history(self, group: ShardGroup) -> Sequence[FabricCheck]:
        status = self._lister.status(ObjectKey("ShardGroup", group.name))
        return status.fabric_checks if isinstance(status, ShardGroupStatus) else ()

    def _user_of(self, group: ShardGroup) -> str:
        """Return the replica that uses the cables of the group; empty if none does.

        The cables of two groups that share Macs may be the same.
        """
        members = set(self._lister.group_members(group))
        for replica in self._lister.replicas():
            if replica.spec.formation is None:
                continue
            used = {rank.node for rank in replica.spec.ranks}
            used |= {leaving_rank.node for leaving_rank in replica.spec.leaving}
            if replica.spec.formation.group == group.name or len(used & members) > 1:
                return f"replica/{replica.name} uses them"
        return ""

    def _seats(self, group: ShardGroup) -> tuple[Seat, ...] | str:
        """Return the seats of the members that are ready; else the reason why there are none."""
        reported = [
            (name, status)
            for name in self._lister.group_members(group)
            if self._lister.is_ready(name) and (status := self._lister.node_status(name))
        ]
        size = group.spec.wanted_size
        if len(reported) < size:
            return f"{len(reported)} of {size} members ready"
        found = assign_seats(group.spec, reported[:size])
        return found.message if isinstance(found, FabricFault) else found

    async def _check(
        self, group: ShardGroup, seats: tuple[Seat, ...], history: Sequence[FabricCheck]
    ) -> FabricCheckView | None:
        """Run one check; None if it was ended for a replica, or another test runs: it stays due."""
        backend, nodes = group.spec.backend, tuple(seat.node for seat in seats)
        test = make_test(
            group,
            seats,
            figures=(QUICK_SIZES, _ROUNDS),
            uid=secrets.token_hex(16),
            now=self._clock.now(),
        )
        log.info("regular check of a group's cables begins", extra={"group": group.name})
        ranks: tuple[FabricRank, ...] = ()
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(
                    run_test(self._transport, self._clock, test, fence=(self._fence(),))
                )
                watching = tasks.create_task(self._end_for_replica(group, running))
                running.add_done_callback(lambda _: watching.cancel())
            ranks = () if running.cancelled() else running.result()
        except* (FabricTestError, StoreError, UndecodableError) as failed:
            failure = failed.exceptions[0]
        at = self._clock.now()
        if isinstance(failure, FabricTestBusyError | UnavailableError):
            log.info("check put off", extra={"group": group.name, "why": str(failure)})
            return None
        if failure is not None:
            failed_check = fabric_checks.failed_check(nodes, backend, _why(failure), at)
            return FabricCheckView(finished=failed_check)
        if not ranks:
            return None
        done = fabric_checks.measured_check(ranks, backend, history, at)
        return FabricCheckView(finished=done)

    async def _end_for_replica(
        self, group: ShardGroup, running: asyncio.Task[tuple[FabricRank, ...]]
    ) -> None:
        """End the check once a replica uses the cables, or the group is changed or deleted."""
        key = ObjectKey("ShardGroup", group.name)
        while self._lister.spec(key) == group and not self._user_of(group):
            await self._clock.sleep(_WATCH_S)
        log.info("check ended for a replica or a change", extra={"group": group.name})
        running.cancel()

    def _set_view(self, group: ShardGroup, new: FabricCheckView) -> None:
        if self.view(group) == new:
            return
        self._views[group.metadata.uid] = new
        self._on_change(ObjectKey("ShardGroup", group.name))


def _why(error: Exception) -> str:
    if isinstance(error, PermissionDeniedError):
        return "the reconciler may not write tests of cables: run `fleetctl init-auth` once after the upgrade"
    return str(error)
