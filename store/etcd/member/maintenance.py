"""The care of an embedded etcd while it runs: keeps its file small, and writes going.

etcd's quota is about the size of its file, which never shrinks by itself. When the file is as large as
the quota, etcd refuses all writes until somebody compacts, defragments and switches the alarm off.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never

from machinery.clock import Clock
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import Alarm, MaintenanceClient, MemberStatus

log = logging.getLogger(__name__)

Notify = Callable[[str], None]

LOOK_EVERY_S = 5.0
# What is still there afterwards is live data, so to do it again soon would only stop the member.
_RECLAIM_EVERY_S = 300.0
# While writes are refused; a defragmentation takes a second or two.
_RESCUE_EVERY_S = 30.0
_WARN_EVERY_S = 3600.0
# Watchers that are behind by more than this list again. At 1.5 MiB, the most that etcd takes for a
# revision, it is a few per cent of the quota.
_KEPT_REVISIONS = 10
# Of the quota: from here on it is time to act, or to warn.
_NEARLY_FULL = 0.8
# With less room, of the quota and in bytes, the next writes would raise the alarm again at once.
_LEAST_ROOM, _LEAST_ROOM_BYTES = 0.05, 4 * 2**20
# etcd's own advice is to defragment when half of a file is free; a small file is not worth it.
_MOSTLY_FREE = 0.5
_WORTH_IT_BYTES = 64 * 2**20
_MIB = 2**20


Trouble: TypeAlias = Literal["corrupt", "full", "nearly full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberObservation:
    """What was seen of the member at a moment, and what was done about it before."""

    status: MemberStatus
    alarms: tuple[Alarm, ...] = ()
    quota_bytes: int
    now_s: float
    reclaimed_at_s: float | None = None
    warned_at_s: Mapping[Trouble, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimSpace:
    """Drop old revisions, then give the free space back to the disk."""

    compact_to: int | None
    """None: what is dropped already is enough."""
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DisarmAlarms:
    """Let writes go on."""

    alarms: tuple[Alarm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnUser:
    """Tell a person what only a person can do."""

    of: Trouble
    message: str


Action: TypeAlias = ReclaimSpace | DisarmAlarms | WarnUser


def decide(seen: MemberObservation) -> Action | None:
    """Return what to do now; after it was done, look again."""
    if any(alarm.kind == "CORRUPT" for alarm in seen.alarms):
        return _warning(
            seen,
            "corrupt",
            "etcd found its data damaged (alarm CORRUPT) and refuses writes. Stop the fleet "
            "(`fleetctl down`) and restore the last backup (`fleetctl restore FILE --force`)",
        )
    full = tuple(alarm for alarm in seen.alarms if alarm.kind == "NOSPACE")
    if full:
        return _free(seen, full)
    status, quota = seen.status, seen.quota_bytes
    in_use, size = status.db_size_in_use_bytes, status.db_size_bytes
    can_reclaim = _is_due(seen.reclaimed_at_s, seen.now_s, _RECLAIM_EVERY_S)
    if in_use >= _NEARLY_FULL * quota:
        if can_reclaim:
            return ReclaimSpace(
                compact_to=_horizon(status), because=f"its {_mib(quota)} are nearly full"
            )
        return _warning(seen, "nearly full", "When it is used up, writes are refused")
    is_mostly_free = in_use < _MOSTLY_FREE * size
    if can_reclaim and is_mostly_free and size > min(_WORTH_IT_BYTES, _NEARLY_FULL * quota):
        return ReclaimSpace(
            compact_to=None, because=f"{_mib(size - in_use)} of {_mib(size)} are free"
        )
    return None


def _free(seen: MemberObservation, full: tuple[Alarm, ...]) -> Action | None:
    """Return the next step out of a store that refuses writes."""
    room_bytes = seen.quota_bytes - seen.status.db_size_bytes
    if room_bytes >= max(_LEAST_ROOM * seen.quota_bytes, _LEAST_ROOM_BYTES):
        return DisarmAlarms(alarms=full)
    if _is_due(seen.reclaimed_at_s, seen.now_s, _RESCUE_EVERY_S):
        return ReclaimSpace(compact_to=_horizon(seen.status), because="its quota is used up")
    return _warning(seen, "full", "It refuses all writes")


def _horizon(status: MemberStatus) -> int:
    return max(1, status.revision - _KEPT_REVISIONS)


def _is_due(last_s: float | None, now_s: float, every_s: float) -> bool:
    return last_s is None or now_s - last_s >= every_s


def _warning(seen: MemberObservation, of: Trouble, message: str) -> WarnUser | None:
    if not _is_due(seen.warned_at_s.get(of), seen.now_s, _WARN_EVERY_S):
        return None
    if of == "corrupt":
        return WarnUser(of=of, message=message)
    in_use, quota = seen.status.db_size_in_use_bytes, seen.quota_bytes
    return WarnUser(
        of=of,
        message=f"what the fleet keeps fills {_mib(in_use)} of etcd's quota of {_mib(quota)}, without "
        f"any history. {message}. Give it more: `fleetctl down`, then "
        f"`fleetctl up --etcd-quota {2 * quota // _MIB}Mi`",
    )


def _mib(size: float) -> str:
    return f"{size / _MIB:.0f} MiB"


class MemberMaintenance:
    """Looks after one member. Run `run()` in a task group beside its supervisor."""

    def __init__(
        self, address: EtcdAddress, clock: Clock, say: Notify, *, quota_bytes: int
    ) -> None:
        self._member = MaintenanceClient(address)
        self._clock = clock
        self._say = say
        self._quota_bytes = quota_bytes
        self._reclaimed_at_s: float | None = None
        self._warned_at_s: dict[Trouble, float] = {}

    async def run(self) -> None:
        """Look, act, look again, until cancelled. An etcd that is away is its supervisor's business."""
        try:
            while True:
                has_acted = False
                try:
                    has_acted = await self.look()
                except StoreError as error:
                    log.info("etcd cannot be looked after now", extra={"why": str(error)})
                if not has_acted:
                    await self._clock.sleep(LOOK_EVERY_S)
        finally:
            await self._member.close()

    async def look(self) -> bool:
        """Look once, and do what is to be done; return whether anything was.

        Raises:
            StoreError: the member did not answer, or could not do it.

        """
        status = await self._member.status()
        action = decide(
            MemberObservation(
                status=status,
                alarms=await self._member.alarms() if status.has_alarms else (),
                quota_bytes=self._quota_bytes,
                now_s=self._clock.monotonic(),
                reclaimed_at_s=self._reclaimed_at_s,
                warned_at_s=self._warned_at_s,
            )
        )
        if action is None:
            return False
        await self._do(action, status)
        return True

    async def _do(self, action: Action, before: MemberStatus) -> None:
        match action:
            case ReclaimSpace(compact_to=revision, because=because):
                # Also when it fails: it would fail again, and stop the member each time.
                self._reclaimed_at_s = self._clock.monotonic()
                if revision is not None:
                    await self._member.compact(revision)
                await self._member.defragment()
                after = await self._member.status()
                self._say(
                    f"etcd was tidied up, for {because}: its file had {_mib(before.db_size_bytes)} "
                    f"and has {_mib(after.db_size_bytes)} now"
                )
            case DisarmAlarms(alarms=alarms):
                for alarm in alarms:
                    await self._member.disarm(alarm)
                self._say("etcd takes writes again: its quota is not used up any more")
            case WarnUser(of=trouble, message=message):
                self._warned_at_s[trouble] = self._clock.monotonic()
                self._say(f"warning: {message}")
            case _:
                assert_never(action)
