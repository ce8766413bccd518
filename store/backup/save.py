"""From a store to an archive: all that is kept below our prefix, as of one revision."""

from contextlib import aclosing
from datetime import datetime
from typing import BinaryIO

from store import keys
from store.backup.archive import Header, Summary, Writer
from store.errors import CompactedError, StoreError
from store.port import KeyValue, Transport

# A history that goes away under a list four times in a row is a store in trouble.
_ATTEMPTS = 4
PREFIX = f"{keys.ROOT}/"


class HalfRestoredError(StoreError):
    """A restore into this store broke off: complete it, then look again."""


def is_kept(item: KeyValue) -> bool:
    """Return whether a backup has the key: not what lives under a lease, and says who is there now."""
    return not (
        item.lease or item.key == keys.RESTORING or item.key.startswith(keys.TRANSIENT_PREFIXES)
    )


async def save(
    transport: Transport, file: BinaryIO, *, now: datetime, fleet_version: str
) -> Summary:
    """Write an archive of the store to the file, from its beginning.

    Raises:
        HalfRestoredError: what is in the store is not all that should be.
        StoreError: it could not be read.
        OSError: the file cannot be written.

    """
    if await transport.get(keys.RESTORING) is not None:
        raise HalfRestoredError("a restore into this store broke off; run `fleetctl restore` again")
    etcd_version = (await transport.status()).version
    for attempt in range(1, _ATTEMPTS + 1):
        file.seek(0)
        file.truncate()
        try:
            return await _save_once(
                transport, file, now=now, fleet_version=fleet_version, etcd_version=etcd_version
            )
        except CompactedError:
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def _save_once(
    transport: Transport, file: BinaryIO, *, now: datetime, fleet_version: str, etcd_version: str
) -> Summary:
    writer: Writer | None = None
    async with aclosing(transport.pages(PREFIX)) as pages:
        async for page in pages:
            if writer is None:
                header = Header(
                    created_at=now,
                    fleet_version=fleet_version,
                    etcd_version=etcd_version,
                    store=page.store,
                    revision=page.revision,
                    prefix=PREFIX,
                )
                writer = Writer(file, header)
            for item in filter(is_kept, page.items):
                writer.add(item.key, item.value)
    assert writer is not None, "a listing has one page at least"
    return writer.finish()
