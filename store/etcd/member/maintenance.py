"""Maintenance of a running embedded etcd: keeps its file small, and restores writes when its quota is used up.

etcd's quota limits the size of its file, which never shrinks by itself. When the file reaches the quota, etcd refuses
all writes until it is compacted and defragmented and the alarm is switched off.
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
# The rest is live data, so repeating it soon would only pause the member.
_RECLAIM_EVERY_S = 300.0
# While writes are refused; a defragmentation takes a second or two.
_RESCUE_EVERY_S = 30.0
_WARN_EVERY_S = 3600.0
# Watchers that are further behind list again. At 1.5 MiB, the most that etcd takes for a revision, ten revisions are a
# few per cent of the quota.
_KEPT_REVISIONS = 10
# The share of the quota from which on it is time to act, or to warn.
_NEARLY_FULL = 0.8
# With less room than this share of the quota, or these bytes, the next writes would raise the alarm again.
_LEAST_ROOM, _LEAST_ROOM_BYTES = 0.05, 4 * 2**20
# etcd recommends to defragment when half of the file is free; for a small file it is not worth it.
_MOSTLY_FREE = 0.5
_WORTH_IT_BYTES = 64 * 2**20
_MIB = 2**20


Trouble: TypeAlias = Literal["corrupt", "full", "nearly full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberObservation:
    """The state of the member at one moment, and the times of earlier actions."""

    status: MemberStatus
    alarms: tuple[Alarm, ...] = ()
    quota_bytes: int
    now_s: float
    reclaimed_at_s: float | None = None
    warned_at_s: Mapping[Trouble, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimSpace:
    """Drop old revisions, then return the free space to the disk."""

    compact_to: int | None
    """The revision to compact to; None if the history is compacted already."""
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DisarmAlarms:
    """Switch alarms off, so that writes are accepted again."""

    alarms: tuple[Alarm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnUser:
    """Tell the user what only a person can do."""

    of: Trouble
    message: str


Action: TypeAlias = ReclaimSpace | DisarmAlarms | WarnUser


def decide(observation: MemberObservation) -> Action | None:
    """Return the next action, if any. Pure; after each action the state is observed again."""
    if any(alarm.kind == "CORRUPT" for alarm in observation.alarms):
        return _warning(
            observation,
            "corrupt",
            "etcd found damaged data (alarm CORRUPT) and refuses writes. Stop the fleet "
            "(`fleetctl down`) and restore the last backup (`fleetctl restore FILE --force`)",
        )
    full = tuple(alarm for alarm in observation.alarms if alarm.kind == "NOSPACE")
    if full:
        return _free(observation, full)
    status, quota = observation.status, observation.quota_bytes
    in_use, size = status.db_size_in_use_bytes, status.db_size_bytes
    can_reclaim = _is_due(observation.reclaimed_at_s, observation.now_s, _RECLAIM_EVERY_S)
    if in_use >= _NEARLY_FULL * quota:
        if can_reclaim:
            return ReclaimSpace(
                compact_to=_horizon(status), because=f"its {_mib(quota)} are nearly full"
            )
        return _warning(observation, "nearly full", "When it is used up, writes are refused")
    is_mostly_free = in_use < _MOSTLY_FREE * size
    if can_reclaim and is_mostly_free and size > min(_WORTH_IT_BYTES, _NEARLY_FULL * quota):
        return ReclaimSpace(
            compact_to=None, because=f"{_mib(size - in_use)} of {_mib(size)} are free"
        )
    return None


def _free(observation: MemberObservation, full: tuple[Alarm, ...]) -> Action | None:
    """Return the next step to make a full store accept writes again."""
    room_bytes = observation.quota_bytes - observation.status.db_size_bytes
    if room_bytes >= max(_LEAST_ROOM * observation.quota_bytes, _LEAST_ROOM_BYTES):
        return DisarmAlarms(alarms=full)
    if _is_due(observation.reclaimed_at_s, observation.now_s, _RESCUE_EVERY_S):
        return ReclaimSpace(compact_to=_horizon(observation.status), because="its quota is used up")
    return _warning(observation, "full", "It refuses all writes")


def _horizon(status: MemberStatus) -> int:
    return max(1, status.revision - _KEPT_REVISIONS)


def _is_due(last_s: float | None, now_s: float, every_s: float) -> bool:
    return last_s is None or now_s - last_s >= every_s


def _warning(observation: MemberObservation, of: Trouble, message: str) -> WarnUser | None:
    if not _is_due(observation.warned_at_s.get(of), observation.now_s, _WARN_EVERY_S):
        return None
    if of == "corrupt":
        return WarnUser(of=of, message=message)
    in_use, quota = observation.status.db_size_in_use_bytes, observation.quota_bytes
    return WarnUser(
        of=of,
        message=f"live data fills {_mib(in_use)} of etcd's quota of {_mib(quota)}, without "
        f"any history. {message}. Raise the quota: `fleetctl down`, then "
        f"`fleetctl up --etcd-quota {2 * quota // _MIB}Mi`",
    )


def _mib(size: float) -> str:
    return f"{size / _MIB:.0f} MiB"


class MemberMaintenance:
    """Maintains one member. Run `run()` in a task group beside its supervisor."""

    def __init__(
        self, address: EtcdAddress, clock: Clock, notify: Notify, *, quota_bytes: int
    ) -> None:
        self._member = MaintenanceClient(address)
        self._clock = clock
        self._notify = notify
        self._quota_bytes = quota_bytes
        self._reclaimed_at_s: float | None = None
        self._warned_at_s: dict[Trouble, float] = {}

    async def run(self) -> None:
        """Observe and act until cancelled. The supervisor handles an etcd that does not answer."""
        try:
            while True:
                has_acted = False
                try:
                    has_acted = await self.check_once()
                except StoreError as error:
                    log.info("etcd cannot be maintained now", extra={"why": str(error)})
                if not has_acted:
                    await self._clock.sleep(LOOK_EVERY_S)
        finally:
            await self._member.close()

    async def check_once(self) -> bool:
        """Observe the member once, and act if necessary; return whether it acted.

        Raises:
            StoreError: the member did not answer, or the action failed.

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
        match action:
            case ReclaimSpace(compact_to=revision, because=because):
                # Set even if the action fails: it would fail again, and pause the member each time.
                self._reclaimed_at_s = self._clock.monotonic()
                if revision is not None:
                    await self._member.compact(revision)
                await self._member.defragment()
                after = await self._member.status()
                self._notify(
                    f"etcd was compacted, because {because}: its file had {_mib(status.db_size_bytes)} "
                    f"and has {_mib(after.db_size_bytes)} now"
                )
            case DisarmAlarms(alarms=alarms):
                for alarm in alarms:
                    await self._member.disarm(alarm)
                self._notify("etcd accepts writes again: its quota is no longer used up")
            case WarnUser(of=trouble, message=message):
                self._warned_at_s[trouble] = self._clock.monotonic()
                self._notify(f"warning: {message}")
            case _:
                assert_never(action)
        return True
