"""The calls of etcd's API that the fleet makes, and the conversion between etcd's messages and the port's types. Pure.

Paths are those of https://etcd.io/docs/v3.5/dev-guide/api_reference_v3/.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, assert_never

from google.protobuf.message import Message

from store.etcd.grpc.proto import etcd_pb2 as pb
from store.port import (
    CreateRevisionGuard,
    Delete,
    Guard,
    KeyChange,
    KeyValue,
    ModRevisionGuard,
    Operation,
    Put,
)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    """One call: its path, and the types of request and response."""

    path: str
    request: type[Request]
    answer: type[Response]


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
PUT = Method("/etcdserverpb.KV/Put", pb.PutRequest, pb.Done)
DELETE_RANGE = Method("/etcdserverpb.KV/DeleteRange", pb.DeleteRangeRequest, pb.Done)
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

MEMBER_LIST = Method("/etcdserverpb.Cluster/MemberList", pb.Empty, pb.MembersResponse)

AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse
)
AUTH_ENABLE = Method("/etcdserverpb.Auth/AuthEnable", pb.Empty, pb.Done)
AUTH_DISABLE = Method("/etcdserverpb.Auth/AuthDisable", pb.Empty, pb.Done)
USER_LIST = Method("/etcdserverpb.Auth/UserList", pb.Empty, pb.NamesResponse)
USER_GET = Method("/etcdserverpb.Auth/UserGet", pb.NameRequest, pb.NamesResponse)
USER_ADD = Method("/etcdserverpb.Auth/UserAdd", pb.UserRequest, pb.Done)
USER_DELETE = Method("/etcdserverpb.Auth/UserDelete", pb.NameRequest, pb.Done)
USER_PASSWORD = Method("/etcdserverpb.Auth/UserChangePassword", pb.UserRequest, pb.Done)
USER_GRANT = Method("/etcdserverpb.Auth/UserGrantRole", pb.UserRoleRequest, pb.Done)
USER_REVOKE = Method("/etcdserverpb.Auth/UserRevokeRole", pb.UserRoleRequest, pb.Done)
ROLE_LIST = Method("/etcdserverpb.Auth/RoleList", pb.Empty, pb.NamesResponse)
ROLE_ADD = Method("/etcdserverpb.Auth/RoleAdd", pb.NameRequest, pb.Done)
ROLE_DELETE = Method("/etcdserverpb.Auth/RoleDelete", pb.NameRequest, pb.Done)
ROLE_GET = Method("/etcdserverpb.Auth/RoleGet", pb.NameRequest, pb.RoleGetResponse)
ROLE_GRANT = Method(
    "/etcdserverpb.Auth/RoleGrantPermission", pb.RoleGrantPermissionRequest, pb.Done
)
ROLE_REVOKE = Method(
    "/etcdserverpb.Auth/RoleRevokePermission", pb.RoleRevokePermissionRequest, pb.Done
)


def raw(key: str) -> bytes:
    """Return the key's bytes; a key that was written by hand need not be UTF-8."""
    return key.encode("utf-8", "surrogateescape")


def key_value(found: pb.KeyValue) -> KeyValue:
    return KeyValue(
        found.key.decode("utf-8", "surrogateescape"),
        found.value,
        found.create_revision,
        found.mod_revision,
        found.lease,
    )


def change(event: pb.Event) -> KeyChange:
    now = key_value(event.kv)
    gone = event.type == pb.Event.DELETE
    return KeyChange(now.key, now.mod_revision, None if gone else now)


def transaction(guards: Sequence[Guard], operations: Sequence[Operation]) -> pb.TxnRequest:
    # Filled in place: messages that are made alone are copied into the request, which costs twice the time.
    request = pb.TxnRequest()
    for guard in guards:
        match guard:
            case ModRevisionGuard(key=key, mod_revision=revision):
                request.compare.add(key=raw(key), target=pb.Compare.MOD, mod_revision=revision)
            case CreateRevisionGuard(key=key, create_revision=revision):
                request.compare.add(
                    key=raw(key), target=pb.Compare.CREATE, create_revision=revision
                )
            case _:
                assert_never(guard)
    for operation in operations:
        _operate(request, operation)
    return request


def put(operation: Put) -> pb.PutRequest:
    return pb.PutRequest(key=raw(operation.key), value=operation.value, lease=operation.lease)


def delete(operation: Delete) -> pb.DeleteRangeRequest:
    return pb.DeleteRangeRequest(key=raw(operation.key))


def _operate(request: pb.TxnRequest, operation: Operation) -> None:
    added = request.success.add()
    match operation:
        case Put(key=key, value=value, lease=lease):
            added.request_put.key = raw(key)
            added.request_put.value = value
            added.request_put.lease = lease
        case Delete(key=key):
            added.request_delete_range.key = raw(key)
        case _:
            assert_never(operation)
