"""The choice of the adapter for an address. Does no I/O."""

from store.etcd.adapter import IDLE_S
from store.etcd.address import EtcdAddress
from store.etcd.authentication import Authentication
from store.namespace import with_prefix
from store.port import Transport


def connect(
    address: EtcdAddress,
    *,
    idle_s: float = IDLE_S,
    authentication: Authentication | None = None,
) -> Transport:
    """Return a transport to the etcd at the address; it connects on first use.

    Keys are below the address's prefix. A watch that receives nothing for `idle_s` seconds counts as broken.
    A process with several transports to one etcd gives them one `authentication`, and closes it after them.
    """
    return with_prefix(_adapter(address, idle_s, authentication), address.prefix)


def _adapter(
    address: EtcdAddress, idle_s: float, authentication: Authentication | None
) -> Transport:
    # Each adapter costs a third of a second to import, and a process needs one of them.
    if address.transport == "http":
        from store.etcd.http.transport import HttpTransport  # noqa: PLC0415 - see above

        return HttpTransport(address, idle_s=idle_s, authentication=authentication)
    from store.etcd.grpc.transport import GrpcTransport  # noqa: PLC0415 - see above

    return GrpcTransport(address, idle_s=idle_s, authentication=authentication)
