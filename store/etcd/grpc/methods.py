"""The calls of etcd's API that the fleet makes: path, request and answer. Pure data.

Paths are those of https://etcd.io/docs/v3.5/dev-guide/api_reference_v3/.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from store.etcd.grpc.proto import etcd_pb2 as pb

Request = TypeVar("Request", bound=Message)
Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Answer]):
    """One call: its path, and what goes and comes."""

    path: str
    request: type[Request]
    answer: type[Answer]


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
PUT = Method("/etcdserverpb.KV/Put", pb.PutRequest, pb.Done)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
COMPACT = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.Done)

WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)

GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.Done)
KEEP_ALIVE = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)

STATUS = Method("/etcdserverpb.Maintenance/Status", pb.Empty, pb.StatusResponse)
DEFRAGMENT = Method("/etcdserverpb.Maintenance/Defragment", pb.Empty, pb.Done)
ALARM = Method("/etcdserverpb.Maintenance/Alarm", pb.AlarmRequest, pb.AlarmResponse)
SNAPSHOT = Method("/etcdserverpb.Maintenance/Snapshot", pb.Empty, pb.SnapshotResponse)
MOVE_LEADER = Method("/etcdserverpb.Maintenance/MoveLeader", pb.MoveLeaderRequest, pb.Done)

MEMBER_LIST = Method("/etcdserverpb.Cluster/MemberList", pb.Empty, pb.MembersResponse)
MEMBER_ADD = Method("/etcdserverpb.Cluster/MemberAdd", pb.MemberAddRequest, pb.MemberAddResponse)
MEMBER_REMOVE = Method("/etcdserverpb.Cluster/MemberRemove", pb.MemberRequest, pb.MembersResponse)
MEMBER_PROMOTE = Method("/etcdserverpb.Cluster/MemberPromote", pb.MemberRequest, pb.MembersResponse)
MEMBER_UPDATE = Method(
    "/etcdserverpb.Cluster/MemberUpdate", pb.MemberUpdateRequest, pb.MembersResponse
)

AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse
)
AUTH_ENABLE = Method("/etcdserverpb.Auth/AuthEnable", pb.Empty, pb.Done)
AUTH_DISABLE = Method("/etcdserverpb.Auth/AuthDisable", pb.Empty, pb.Done)
USER_LIST = Method("/etcdserverpb.Auth/UserList", pb.Empty, pb.NamesResponse)
USER_GET = Method("/etcdserverpb.Auth/UserGet", pb.NameRequest, pb.NamesResponse)
USER_ADD = Method("/etcdserverpb.Auth/UserAdd", pb.UserRequest, pb.Done)
USER_PASSWORD = Method("/etcdserverpb.Auth/UserChangePassword", pb.UserRequest, pb.Done)
USER_DELETE = Method("/etcdserverpb.Auth/UserDelete", pb.NameRequest, pb.Done)
USER_GRANT = Method("/etcdserverpb.Auth/UserGrantRole", pb.UserRoleRequest, pb.Done)
USER_REVOKE = Method("/etcdserverpb.Auth/UserRevokeRole", pb.UserRoleRequest, pb.Done)
ROLE_LIST = Method("/etcdserverpb.Auth/RoleList", pb.Empty, pb.NamesResponse)
ROLE_ADD = Method("/etcdserverpb.Auth/RoleAdd", pb.NameRequest, pb.Done)
ROLE_GET = Method("/etcdserverpb.Auth/RoleGet", pb.NameRequest, pb.RoleGetResponse)
ROLE_DELETE = Method("/etcdserverpb.Auth/RoleDelete", pb.NameRequest, pb.Done)
ROLE_GRANT = Method(
    "/etcdserverpb.Auth/RoleGrantPermission", pb.RoleGrantPermissionRequest, pb.Done
)
ROLE_REVOKE = Method(
    "/etcdserverpb.Auth/RoleRevokePermission", pb.RoleRevokePermissionRequest, pb.Done
)
