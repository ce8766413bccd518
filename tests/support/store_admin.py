"""Calls to etcd's administrative API that only tests make: a member is announced, users and roles are deleted."""

from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import AuthClient
from store.etcd.grpc.channel import GrpcChannel
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.grpc.wire import Method

_MEMBER_ADD = Method("/etcdserverpb.Cluster/MemberAdd", pb.MemberAddRequest, pb.MemberAddResponse)
_USER_DELETE = Method("/etcdserverpb.Auth/UserDelete", pb.NameRequest, pb.Done)
_ROLE_DELETE = Method("/etcdserverpb.Auth/RoleDelete", pb.NameRequest, pb.Done)


async def add_learner(address: EtcdAddress, peer_url: str) -> None:
    """Announce a member at this peer URL."""
    channel = GrpcChannel(address)
    try:
        request = pb.MemberAddRequest(peer_urls=[peer_url], is_learner=True)
        await channel.call(_MEMBER_ADD, request, limit_s=10)
    finally:
        await channel.close()


async def delete_user(client: AuthClient, user: str) -> None:
    await client._channel.call(_USER_DELETE, pb.NameRequest(name=user))


async def delete_role(client: AuthClient, role: str) -> None:
    await client._channel.call(_ROLE_DELETE, pb.NameRequest(name=role))
