"""Administration of etcd over gRPC: status, alarms, compaction and snapshots of one member; users and roles.

`MaintenanceClient` speaks to one endpoint, because etcd does most of this on the member that gets the request.
The fleet's processes need nothing of it; fleetctl and the embedded member do.
"""

import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import BinaryIO, Literal, TypeAlias

from store.errors import AuthOffError, CompactedError, PermissionDeniedError, StoreError
from store.etcd.address import EtcdAddress
from store.etcd.grpc import wire
from store.etcd.grpc.channel import GrpcChannel
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.users import Permission, Right

# A member that defragments serves no requests, and takes a second or two per GiB on an SSD.
_SLOW_S = 60.0
# Between two chunks of a snapshot (32 KiB each).
_CHUNK_S = 15.0
_SHA256 = 32

AlarmKind: TypeAlias = Literal["NOSPACE", "CORRUPT"]
_NUMBERS: "dict[AlarmKind, pb.AlarmType]" = {"NOSPACE": pb.NOSPACE, "CORRUPT": pb.CORRUPT}
_KINDS: dict[int, AlarmKind] = {number: kind for kind, number in _NUMBERS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """The state of one member, as it reports it."""

    version: str
    revision: int
    store: str
    """The cluster's id, as in `store.reads.Listing`."""
    member: int
    leader: int
    """The id of the leading member; 0 if this one knows of none."""
    db_size_bytes: int
    """The size of the file, which the quota limits; only defragmentation makes it smaller."""
    db_size_in_use_bytes: int
    is_learner: bool
    has_alarms: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An active alarm, and the member that raised it."""

    member: int
    kind: AlarmKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """Size and checksum of a snapshot's file."""

    size_bytes: int
    sha256: str
    """Of the whole file, as `shasum -a 256 FILE` prints it."""


class DamagedSnapshotError(StoreError):
    """The snapshot did not arrive as etcd sent it: take another one."""


def member_addresses(address: EtcdAddress) -> Sequence[EtcdAddress]:
    """Return one address for each endpoint of the address."""
    if address.socket is not None:
        return (address,)
    return tuple(replace(address, endpoints=(url,)) for url in address.endpoints)


class MaintenanceClient:
    """Maintenance calls to one member. Close it after use.

    Every call raises `UnavailableError` without an answer, and other `StoreError`s for etcd's errors.
    """

    def __init__(self, address: EtcdAddress) -> None:
        if len(member_addresses(address)) != 1:
            raise ValueError(f"one endpoint, not {address}")
        self._channel = GrpcChannel(address)

    async def close(self) -> None:
        await self._channel.close()

    async def status(self) -> MemberStatus:
        answer = await self._channel.call(wire.STATUS, pb.Empty())
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

        Each call costs etcd an entry in its log: check first whether `status` reports alarms.
        """
        answer = await self._channel.call(wire.ALARM, pb.AlarmRequest(action=pb.AlarmRequest.GET))
        return tuple(
            Alarm(member=alarm.member_id, kind=_KINDS[alarm.alarm])
            for alarm in answer.alarms
            if alarm.alarm in _KINDS
        )

    async def disarm(self, alarm: Alarm) -> None:
        """Switch an alarm off; one that is off already is no error."""
        number = _NUMBERS[alarm.kind]
        # Without the member's id etcd confirms and does nothing.
        request = pb.AlarmRequest(
            action=pb.AlarmRequest.DEACTIVATE, member_id=alarm.member, alarm=number
        )
        await self._channel.call(wire.ALARM, request)

    async def compact(self, revision: int) -> None:
        """Drop the history before the revision; returns when its space is free within the file.

        A revision that is compacted already is no error.
        """
        request = pb.CompactionRequest(revision=revision, physical=True)
        try:
            await self._channel.call(wire.COMPACT, request, limit_s=_SLOW_S)
        except CompactedError:
            return

    async def defragment(self) -> None:
        """Return free space in the file to the disk; the member serves no requests meanwhile."""
        await self._channel.call(wire.DEFRAGMENT, pb.Empty(), limit_s=_SLOW_S)

    async def snapshot(self, file: BinaryIO) -> SnapshotFile:
        """Write the member's whole database to the file.

        The SHA-256 at the end of etcd's stream is verified, and written as well: `etcdutl` expects it.

        Raises:
            DamagedSnapshotError: a part is missing or wrong.
            OSError: the file cannot be written.

        """
        digest, size = hashlib.sha256(), 0
        # The last chunk is the checksum, so each chunk is hashed only after another one has followed.
        held, left = b"", 1
        answers = self._channel.answers(wire.SNAPSHOT, pb.Empty(), limit_s=_CHUNK_S)
        async with aclosing(answers):
            async for answer in answers:
                digest.update(held)
                file.write(answer.blob)
                size += len(answer.blob)
                held, left = answer.blob, answer.remaining_bytes
        if left or len(held) != _SHA256 or held != digest.digest():
            raise DamagedSnapshotError("the snapshot arrived damaged or truncated")
        digest.update(held)
        return SnapshotFile(size_bytes=size, sha256=digest.hexdigest())


# etcd stores and verifies passwords with bcrypt, which is slow by design.
_PASSWORD_S = 10.0

_RIGHTS = {
    Right.READ: pb.Permission.READ,
    Right.WRITE: pb.Permission.WRITE,
    Right.READWRITE: pb.Permission.READWRITE,
}


class AuthClient:
    """Users and roles of the etcd at an address; once authentication is on, only root may use it.

    Every call raises the errors of `store.errors`; adding what exists, or changing what does not, is a StoreError.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self._channel = GrpcChannel(address)

    async def close(self) -> None:
        await self._channel.close()

    async def is_on(self) -> bool:
        """Return whether authentication is on.

        Asks with an invalid password, because etcd 3.4 has no AuthStatus.
        """
        try:
            await self.is_password("", "")
        except AuthOffError:
            return False
        return True

    async def is_password(self, user: str, password: str) -> bool:
        """Return whether the password is the user's.

        Raises:
            AuthOffError: authentication is off, so etcd does not verify passwords.

        """
        request = pb.AuthenticateRequest(name=user, password=password)
        try:
            await self._channel.call(wire.AUTHENTICATE, request, limit_s=_PASSWORD_S)
        except PermissionDeniedError:
            return False
        return True

    async def enable(self) -> None:
        """Turn authentication on; the user root must exist, with its role."""
        await self._channel.call(wire.AUTH_ENABLE, pb.Empty(), limit_s=_PASSWORD_S)

    async def disable(self) -> None:
        """Turn authentication off; users and roles are kept."""
        await self._channel.call(wire.AUTH_DISABLE, pb.Empty())

    async def users(self) -> frozenset[str]:
        return frozenset((await self._channel.call(wire.USER_LIST, pb.Empty())).names)

    async def add_user(self, user: str, password: str) -> None:
        request = pb.UserRequest(name=user, password=password)
        await self._channel.call(wire.USER_ADD, request, limit_s=_PASSWORD_S)

    async def delete_user(self, user: str) -> None:
        """Delete the user; its tokens become invalid at once."""
        await self._channel.call(wire.USER_DELETE, pb.NameRequest(name=user))

    async def set_password(self, user: str, password: str) -> None:
        """Set the user's password; its current tokens become invalid."""
        request = pb.UserRequest(name=user, password=password)
        await self._channel.call(wire.USER_PASSWORD, request, limit_s=_PASSWORD_S)

    async def roles_of(self, user: str) -> frozenset[str]:
        answer = await self._channel.call(wire.USER_GET, pb.NameRequest(name=user))
        return frozenset(answer.names)

    async def grant_role(self, user: str, role: str) -> None:
        await self._channel.call(wire.USER_GRANT, pb.UserRoleRequest(user=user, role=role))

    async def revoke_role(self, user: str, role: str) -> None:
        await self._channel.call(wire.USER_REVOKE, pb.UserRoleRequest(user=user, role=role))

    async def roles(self) -> frozenset[str]:
        return frozenset((await self._channel.call(wire.ROLE_LIST, pb.Empty())).names)

    async def add_role(self, role: str) -> None:
        await self._channel.call(wire.ROLE_ADD, pb.NameRequest(name=role))

    async def delete_role(self, role: str) -> None:
        await self._channel.call(wire.ROLE_DELETE, pb.NameRequest(name=role))

    async def permissions_of(self, role: str) -> frozenset[Permission]:
        answer = await self._channel.call(wire.ROLE_GET, pb.NameRequest(name=role))
        return frozenset(map(_permission, answer.perm))

    async def grant(self, role: str, permission: Permission) -> None:
        """Grant the role a right to a range.

        It replaces the right to the same range, unless another range begins at the same key: then the role may
        have both.
        """
        message = pb.Permission(
            perm_type=_RIGHTS[permission.right],
            key=wire.raw(permission.key),
            range_end=wire.raw(permission.end),
        )
        request = pb.RoleGrantPermissionRequest(name=role, perm=message)
        await self._channel.call(wire.ROLE_GRANT, request)

    async def revoke(self, role: str, permission: Permission) -> None:
        request = pb.RoleRevokePermissionRequest(
            role=role, key=wire.raw(permission.key), range_end=wire.raw(permission.end)
        )
        await self._channel.call(wire.ROLE_REVOKE, request)


def _permission(found: pb.Permission) -> Permission:
    return Permission(
        key=found.key.decode("utf-8", "surrogateescape"),
        end=found.range_end.decode("utf-8", "surrogateescape"),
        right=Right(pb.Permission.Type.Name(found.perm_type)),
    )
