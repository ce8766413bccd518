"""The way to etcd. Makes the adapter that the address asks for; does no I/O."""

from store.etcd.adapter import IDLE_S
from store.etcd.address import EtcdAddress
from store.namespace import with_prefix
from store.port import Transport


def connect(address: EtcdAddress, *, idle_s: float = IDLE_S) -> Transport:
    """Return a transport to the etcd at the address; it connects when first used.

    Keys lie below the address's prefix. A watch that hears nothing for `idle_s` seconds counts as
    broken.
    """
    return with_prefix(_adapter(address, idle_s), address.prefix)


def _adapter(address: EtcdAddress, idle_s: float) -> Transport:
    # Each way costs a third of a second to import, and nobody needs both.
    if address.transport == "http":
        from store.etcd.http.transport import HttpTransport  # noqa: PLC0415 - see above

        return HttpTransport(address, idle_s=idle_s)
    from store.etcd.grpc.transport import GrpcTransport  # noqa: PLC0415 - see above

    return GrpcTransport(address, idle_s=idle_s)
