"""The way to etcd. Makes the adapter that the address asks for; does no I/O."""

from store.address import EtcdAddress
from store.http.route import IDLE_S
from store.http.transport import HttpTransport
from store.port import Transport


def connect(address: EtcdAddress, *, idle_s: float = IDLE_S) -> Transport:
    """Return a transport to the etcd at the address; it connects when first used.

    A watch that hears nothing for `idle_s` seconds counts as broken.
    """
    return HttpTransport(address, idle_s=idle_s)
