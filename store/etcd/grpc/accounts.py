"""etcd's users, roles and permissions over gRPC, for administrators: no process of the fleet needs it."""

from store.auth.access import Permission, Right
from store.errors import AuthOffError, PermissionDeniedError
from store.etcd.address import EtcdAddress
from store.etcd.grpc import methods, wire
from store.etcd.grpc.channel import GrpcChannel
from store.etcd.grpc.proto import etcd_pb2 as pb

# etcd makes and checks passwords with bcrypt, which takes long on purpose.
_PASSWORD_S = 10.0

_RIGHTS = {
    Right.READ: pb.Permission.READ,
    Right.WRITE: pb.Permission.WRITE,
    Right.READWRITE: pb.Permission.READWRITE,
}


class EtcdAccounts:
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
            await self._channel.call(methods.AUTHENTICATE, request, limit_s=_PASSWORD_S)
        except PermissionDeniedError:
            return False
        return True

    async def enable(self) -> None:
        """Ask for users and passwords from now on; root must be there, with its role."""
        await self._channel.call(methods.AUTH_ENABLE, pb.Empty(), limit_s=_PASSWORD_S)

    async def disable(self) -> None:
        """Ask nobody any more; users and roles stay."""
        await self._channel.call(methods.AUTH_DISABLE, pb.Empty())

    async def users(self) -> frozenset[str]:
        return frozenset((await self._channel.call(methods.USER_LIST, pb.Empty())).names)

    async def add_user(self, user: str, password: str) -> None:
        request = pb.UserRequest(name=user, password=password)
        await self._channel.call(methods.USER_ADD, request, limit_s=_PASSWORD_S)

    async def set_password(self, user: str, password: str) -> None:
        """Give the user another password; tokens that it has end at once."""
        request = pb.UserRequest(name=user, password=password)
        await self._channel.call(methods.USER_PASSWORD, request, limit_s=_PASSWORD_S)

    async def delete_user(self, user: str) -> None:
        await self._channel.call(methods.USER_DELETE, pb.NameRequest(name=user))

    async def roles_of(self, user: str) -> frozenset[str]:
        answer = await self._channel.call(methods.USER_GET, pb.NameRequest(name=user))
        return frozenset(answer.names)

    async def grant_role(self, user: str, role: str) -> None:
        await self._channel.call(methods.USER_GRANT, pb.UserRoleRequest(user=user, role=role))

    async def revoke_role(self, user: str, role: str) -> None:
        await self._channel.call(methods.USER_REVOKE, pb.UserRoleRequest(user=user, role=role))

    async def roles(self) -> frozenset[str]:
        return frozenset((await self._channel.call(methods.ROLE_LIST, pb.Empty())).names)

    async def add_role(self, role: str) -> None:
        await self._channel.call(methods.ROLE_ADD, pb.NameRequest(name=role))

    async def delete_role(self, role: str) -> None:
        await self._channel.call(methods.ROLE_DELETE, pb.NameRequest(name=role))

    async def permissions_of(self, role: str) -> frozenset[Permission]:
        answer = await self._channel.call(methods.ROLE_GET, pb.NameRequest(name=role))
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
        await self._channel.call(methods.ROLE_GRANT, request)

    async def revoke(self, role: str, permission: Permission) -> None:
        request = pb.RoleRevokePermissionRequest(
            role=role, key=wire.raw(permission.key), range_end=wire.raw(permission.end)
        )
        await self._channel.call(methods.ROLE_REVOKE, request)


def _permission(found: pb.Permission) -> Permission:
    return Permission(
        key=found.key.decode("utf-8", "surrogateescape"),
        end=found.range_end.decode("utf-8", "surrogateescape"),
        right=Right(pb.Permission.Type.Name(found.perm_type)),
    )
