"""The care of one etcd member: its size and alarms, compaction, defragmentation, snapshot.

Speaks to one endpoint, for etcd does most of this to the member that was asked and to no other.

etcd's users, roles and permissions over gRPC, for administrators: no process of the fleet needs it.
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
class SnapshotFile:
    """What was written to a snapshot's file."""

    size_bytes: int
    sha256: str
    """Of the whole file, as `shasum -a 256 FILE` prints it."""


class DamagedSnapshotError(StoreError):
    """The snapshot did not arrive as etcd sent it: take another one."""


def member_addresses(address: EtcdAddress) -> Sequence[EtcdAddress]:
    """Return an address for each endpoint in the address."""
    if address.socket is not None:
        return (address,)
    return tuple(replace(address, endpoints=(url,)) for url in address.endpoints)


class MaintenanceClient:
    """Calls to one member. To be closed.

    Every call raises `UnavailableError` if there is no answer, and other `StoreError`s as etcd says.
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

        To ask costs etcd an entry in its log: look whether `status` says that there are any.
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
        # Without the member's id etcd says yes and does nothing.
        request = pb.AlarmRequest(
            action=pb.AlarmRequest.DEACTIVATE, member_id=alarm.member, alarm=number
        )
        await self._channel.call(wire.ALARM, request)

    async def compact(self, revision: int) -> None:
        """Drop what was before the revision; returns when its space is free within the file.

        What is dropped already is no error.
        """
        request = pb.CompactionRequest(revision=revision, physical=True)
        try:
            await self._channel.call(wire.COMPACT, request, limit_s=_SLOW_S)
        except CompactedError:
            return

    async def defragment(self) -> None:
        """Give free space in the file back to the disk; the member serves nobody meanwhile."""
        await self._channel.call(wire.DEFRAGMENT, pb.Empty(), limit_s=_SLOW_S)

    async def move_leader(self, target: int) -> None:
        """Have another member lead. This one must be the leader."""
        request = pb.MoveLeaderRequest(target_id=target)
        await self._channel.call(wire.MOVE_LEADER, request, limit_s=10.0)

    async def snapshot(self, file: BinaryIO) -> SnapshotFile:
        """Write the member's whole database to the file.

        The SHA-256 that etcd sends at its end is checked and written, too: `etcdutl` looks for it.

        Raises:
            DamagedSnapshotError: something of it is missing or wrong.
            OSError: the file cannot be written.

        """
        digest, size = hashlib.sha256(), 0
        # The hash comes last: nothing is hashed before it is known not to be the last.
        held, left = b"", 1
        answers = self._channel.answers(wire.SNAPSHOT, pb.Empty(), limit_s=_CHUNK_S)
        async with aclosing(answers):
            async for answer in answers:
                digest.update(held)
                file.write(answer.blob)
                size += len(answer.blob)
                held, left = answer.blob, answer.remaining_bytes
        if left or len(held) != _SHA256 or held != digest.digest():
            raise DamagedSnapshotError("the snapshot arrived damaged or cut short")
        digest.update(held)
        return SnapshotFile(size_bytes=size, sha256=digest.hexdigest())


# etcd makes and checks passwords with bcrypt, which takes long on purpose.
_PASSWORD_S = 10.0

_RIGHTS = {
    Right.READ: pb.Permission.READ,
    Right.WRITE: pb.Permission.WRITE,
    Right.READWRITE: pb.Permission.READWRITE,
}


class AuthClient:
    """Users and roles of the etcd at an address; once users are asked for, only root may.

    Every call raises the errors of `store.errors`; what is there already, or is not, is a StoreError.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self._channel = GrpcChannel(address)

    async def close(self) -> None:
        await self._channel.close()

    async def is_on(self) -> bool:
        """Return whether etcd asks for users and passwords.

        Asked with a password that nobody has, and not with AuthStatus, which etcd 3.4 has not.
        """
        try:
            await self.is_password("", "")
        except AuthOffError:
            return False
        return True

    async def is_password(self, user: str, password: str) -> bool:
        """Return whether it is the user's password.

        Raises:
            AuthOffError: etcd does not ask for passwords, so it does not check any.

        """
        request = pb.AuthenticateRequest(name=user, password=password)
        try:
            await self._channel.call(wire.AUTHENTICATE, request, limit_s=_PASSWORD_S)
        except PermissionDeniedError:
            return False
        return True

    async def enable(self) -> None:
        """Ask for users and passwords from now on; root must be there, with its role."""
        await self._channel.call(wire.AUTH_ENABLE, pb.Empty(), limit_s=_PASSWORD_S)

    async def disable(self) -> None:
        """Ask nobody any more; users and roles stay."""
        await self._channel.call(wire.AUTH_DISABLE, pb.Empty())

    async def users(self) -> frozenset[str]:
        return frozenset((await self._channel.call(wire.USER_LIST, pb.Empty())).names)

    async def add_user(self, user: str, password: str) -> None:
        request = pb.UserRequest(name=user, password=password)
        await self._channel.call(wire.USER_ADD, request, limit_s=_PASSWORD_S)

    async def set_password(self, user: str, password: str) -> None:
        """Give the user another password; tokens that it has end at once."""
        request = pb.UserRequest(name=user, password=password)
        await self._channel.call(wire.USER_PASSWORD, request, limit_s=_PASSWORD_S)

    async def delete_user(self, user: str) -> None:
        await self._channel.call(wire.USER_DELETE, pb.NameRequest(name=user))

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
        """Give the role a right to a range.

        It replaces the right to that very range, unless another range begins at the same key: then
        the role may have both.
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
