"""Our words to etcd's messages and back. Pure."""

from collections.abc import Sequence
from typing import assert_never

from store.etcd.grpc.proto import etcd_pb2 as pb
from store.port import Change, CreatedAt, Delete, Guard, KeyValue, Operation, Put, Unchanged


def raw(key: str) -> bytes:
    """Return the key's bytes; a key that somebody wrote by hand need not be text."""
    return key.encode("utf-8", "surrogateescape")


def key_value(found: pb.KeyValue) -> KeyValue:
    return KeyValue(
        found.key.decode("utf-8", "surrogateescape"),
        found.value,
        found.create_revision,
        found.mod_revision,
        found.lease,
    )


def change(event: pb.Event) -> Change:
    now = key_value(event.kv)
    gone = event.type == pb.Event.DELETE
    return Change(now.key, now.mod_revision, None if gone else now)


def transaction(guards: Sequence[Guard], operations: Sequence[Operation]) -> pb.TxnRequest:
    return pb.TxnRequest(
        compare=[_compare(guard) for guard in guards],
        success=[_operation(operation) for operation in operations],
    )


def put(operation: Put) -> pb.PutRequest:
    return pb.PutRequest(key=raw(operation.key), value=operation.value, lease=operation.lease)


def _compare(guard: Guard) -> pb.Compare:
    match guard:
        case Unchanged(key=key, mod_revision=revision):
            return pb.Compare(key=raw(key), target=pb.Compare.MOD, mod_revision=revision)
        case CreatedAt(key=key, create_revision=revision):
            return pb.Compare(key=raw(key), target=pb.Compare.CREATE, create_revision=revision)
        case _:
            assert_never(guard)


def _operation(operation: Operation) -> pb.RequestOp:
    match operation:
        case Put():
            return pb.RequestOp(request_put=put(operation))
        case Delete(key=key):
            return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=raw(key)))
        case _:
            assert_never(operation)
