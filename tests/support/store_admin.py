"""Calls to etcd's administrative API that only tests make: members join and leave, users and roles are deleted."""

from collections.abc import Sequence

from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import AuthClient
from store.etcd.grpc.channel import GrpcChannel
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.grpc.wire import Method, Request, Response

_CHANGE_S = 10.0
_MEMBER_ADD = Method("/etcdserverpb.Cluster/MemberAdd", pb.MemberAddRequest, pb.MemberAddResponse)
_MEMBER_PROMOTE = Method(
    "/etcdserverpb.Cluster/MemberPromote", pb.MemberRequest, pb.MembersResponse
)
_MEMBER_UPDATE = Method(
    "/etcdserverpb.Cluster/MemberUpdate", pb.MemberUpdateRequest, pb.MembersResponse
)
_MEMBER_REMOVE = Method("/etcdserverpb.Cluster/MemberRemove", pb.MemberRequest, pb.MembersResponse)
_MOVE_LEADER = Method("/etcdserverpb.Maintenance/MoveLeader", pb.MoveLeaderRequest, pb.Done)
_USER_DELETE = Method("/etcdserverpb.Auth/UserDelete", pb.NameRequest, pb.Done)
_ROLE_DELETE = Method("/etcdserverpb.Auth/RoleDelete", pb.NameRequest, pb.Done)


async def add_learner(address: EtcdAddress, peer_urls: Sequence[str]) -> int:
    """Add a member with these peer URLs as a learner, before it is started; return its id."""
    request = pb.MemberAddRequest(peer_urls=peer_urls, is_learner=True)
    return (await _call(address, _MEMBER_ADD, request)).member.id


async def promote(address: EtcdAddress, member: int) -> bool:
    """Promote a learner to a voting member; return false while it is still catching up."""
    try:
        await _call(address, _MEMBER_PROMOTE, pb.MemberRequest(id=member))
    except StoreError as error:
        if "in sync with leader" in str(error):
            return False
        raise
    return True


async def update(address: EtcdAddress, member: int, peer_urls: Sequence[str]) -> None:
    request = pb.MemberUpdateRequest(id=member, peer_urls=peer_urls)
    await _call(address, _MEMBER_UPDATE, request)


async def remove(address: EtcdAddress, member: int) -> None:
    await _call(address, _MEMBER_REMOVE, pb.MemberRequest(id=member))


async def move_leader(address: EtcdAddress, target: int) -> None:
    """Make another member the leader. `address` must be that of the current leader."""
    await _call(address, _MOVE_LEADER, pb.MoveLeaderRequest(target_id=target))


async def delete_user(client: AuthClient, user: str) -> None:
    await client._channel.call(_USER_DELETE, pb.NameRequest(name=user))


async def delete_role(client: AuthClient, role: str) -> None:
    await client._channel.call(_ROLE_DELETE, pb.NameRequest(name=role))


async def _call(
    address: EtcdAddress, method: Method[Request, Response], request: Request
) -> Response:
    channel = GrpcChannel(address)
    try:
        return await channel.call(method, request, limit_s=_CHANGE_S)
    finally:
        await channel.close()
