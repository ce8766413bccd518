"""Calls to etcd's administrative API that only tests make: users and roles are deleted."""

from store.etcd.grpc.admin import AuthClient
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.grpc.wire import Method

_USER_DELETE = Method("/etcdserverpb.Auth/UserDelete", pb.NameRequest, pb.Done)
_ROLE_DELETE = Method("/etcdserverpb.Auth/RoleDelete", pb.NameRequest, pb.Done)


async def delete_user(client: AuthClient, user: str) -> None:
    await client._channel.call(_USER_DELETE, pb.NameRequest(name=user))


async def delete_role(client: AuthClient, role: str) -> None:
    await client._channel.call(_ROLE_DELETE, pb.NameRequest(name=role))
