"""The care of one etcd member: its size and alarms, compaction, defragmentation, snapshot.

Speaks to one endpoint, for etcd does most of this to the member that was asked and to no other.
"""

import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import BinaryIO, Literal, TypeAlias

from store.errors import CompactedError, StoreError
from store.etcd.address import EtcdAddress
from store.etcd.grpc import methods
from store.etcd.grpc.channel import GrpcChannel
from store.etcd.grpc.proto import etcd_pb2 as pb

# A member that defragments serves nobody, and takes a second or two per GiB on an SSD.
_SLOW_S = 60.0
# Between two chunks of a snapshot (32 KiB each).
_CHUNK_S = 15.0
_SHA256 = 32

AlarmKind: TypeAlias = Literal["NOSPACE", "CORRUPT"]
_NUMBERS: "dict[AlarmKind, pb.AlarmType]" = {"NOSPACE": pb.NOSPACE, "CORRUPT": pb.CORRUPT}
_KINDS: dict[int, AlarmKind] = {number: kind for kind, number in _NUMBERS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """What a member says of itself."""

    version: str
    revision: int
    store: str
    """The cluster's id, as in `store.port.Listing`."""
    member: int
    leader: int
    """The member that leads; 0 if this one knows of none."""
    db_size_bytes: int
    """Of the file, which is what the quota is about: it shrinks by defragmentation only."""
    db_size_in_use_bytes: int
    is_learner: bool
    has_alarms: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An alarm that is on, and the member that raised it."""

    member: int
    kind: AlarmKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was written to a snapshot's file."""

    size_bytes: int
    sha256: str
    """Of the whole file, as `shasum -a 256 FILE` prints it."""


class DamagedSnapshotError(StoreError):
    """The snapshot did not arrive as etcd sent it: take another one."""


def each_endpoint(address: EtcdAddress) -> Sequence[EtcdAddress]:
    """Return an address for each endpoint in the address."""
    if address.socket is not None:
        return (address,)
    return tuple(replace(address, endpoints=(url,)) for url in address.endpoints)


class Maintenance:
    """Calls to one member. To be closed.

    Every call raises `UnavailableError` if there is no answer, and other `StoreError`s as etcd says.
    """

    def __init__(self, address: EtcdAddress) -> None:
        if len(each_endpoint(address)) != 1:
            raise ValueError(f"one endpoint, not {address}")
        self._channel = GrpcChannel(address)

    async def close(self) -> None:
        await self._channel.close()

    async def status(self) -> MemberStatus:
        answer = await self._channel.call(methods.STATUS, pb.Empty())
        return MemberStatus(
            version=answer.version,
            revision=answer.header.revision,
            store=str(answer.header.cluster_id),
            member=answer.header.member_id,
            leader=answer.leader,
            db_size_bytes=answer.db_size,
            db_size_in_use_bytes=answer.db_size_in_use,
            is_learner=answer.is_learner,
            has_alarms=any("alarm:" in error for error in answer.errors),
        )

    async def alarms(self) -> tuple[Alarm, ...]:
        """Return the alarms of all members.

        To ask costs etcd an entry in its log: look whether `status` says that there are any.
        """
        answer = await self._channel.call(
            methods.ALARM, pb.AlarmRequest(action=pb.AlarmRequest.GET)
        )
        return tuple(
            Alarm(member=alarm.member_id, kind=_KINDS[alarm.alarm])
            for alarm in answer.alarms
            if alarm.alarm in _KINDS
        )

    async def disarm(self, alarm: Alarm) -> None:
        """Switch an alarm off; one that is off already is no error."""
        number = _NUMBERS[alarm.kind]
        # Without the member's id etcd says yes and does nothing.
        request = pb.AlarmRequest(
            action=pb.AlarmRequest.DEACTIVATE, member_id=alarm.member, alarm=number
        )
        await self._channel.call(methods.ALARM, request)

    async def compact(self, revision: int) -> None:
        """Drop what was before the revision; returns when its space is free within the file.

        What is dropped already is no error.
        """
        request = pb.CompactionRequest(revision=revision, physical=True)
        try:
            await self._channel.call(methods.COMPACT, request, limit_s=_SLOW_S)
        except CompactedError:
            return

    async def defragment(self) -> None:
        """Give free space in the file back to the disk; the member serves nobody meanwhile."""
        await self._channel.call(methods.DEFRAGMENT, pb.Empty(), limit_s=_SLOW_S)

    async def move_leader(self, target: int) -> None:
        """Have another member lead. This one must be the leader."""
        request = pb.MoveLeaderRequest(target_id=target)
        await self._channel.call(methods.MOVE_LEADER, request, limit_s=10.0)

    async def snapshot(self, file: BinaryIO) -> Snapshot:
        """Write the member's whole database to the file.

        The SHA-256 that etcd sends at its end is checked and written, too: `etcdutl` looks for it.

        Raises:
            DamagedSnapshotError: something of it is missing or wrong.
            OSError: the file cannot be written.

        """
        digest, size = hashlib.sha256(), 0
        # The hash comes last: nothing is hashed before it is known not to be the last.
        held, left = b"", 1
        answers = self._channel.answers(methods.SNAPSHOT, pb.Empty(), limit_s=_CHUNK_S)
        async with aclosing(answers):
            async for answer in answers:
                digest.update(held)
                file.write(answer.blob)
                size += len(answer.blob)
                held, left = answer.blob, answer.remaining_bytes
        if left or len(held) != _SHA256 or held != digest.digest():
            raise DamagedSnapshotError("the snapshot arrived damaged or cut short")
        digest.update(held)
        return Snapshot(size_bytes=size, sha256=digest.hexdigest())
