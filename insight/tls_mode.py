"""The fleet's TLS mode as commands show it."""

from schemas.trust import FleetTrust, TlsMode
from store import codec, keys
from store.reads import StoreReader

_TEXTS = {
    None: "off: the fleet has no certificates",
    TlsMode.PERMISSIVE: "permissive: processes accept TLS and still dial plain HTTP",
    TlsMode.TLS: "tls: processes dial TLS and still accept plain HTTP",
    TlsMode.STRICT: "strict: plain HTTP is refused",
}


async def read_mode(store: StoreReader) -> TlsMode | None:
    """Return the mode; None if the fleet has no authority. Raises StoreError."""
    item = await store.get(keys.FLEET_TRUST)
    return None if item is None else codec.decode(FleetTrust, item).mode


def mode_text(mode: TlsMode | None) -> str:
    """Return the mode in words."""
    return _TEXTS[mode]
