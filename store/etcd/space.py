"""The space of etcd's database, which is asked for regularly, as metrics: at its quota etcd refuses every write."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.prometheus import Gauge, MetricFamily
from store.errors import StoreError
from store.etcd.address import EtcdAddress

if (
    TYPE_CHECKING
):  # its import takes a third of a second, which a process with the JSON gateway saves
    from store.etcd.grpc.admin import MemberStatus

log = logging.getLogger(__name__)

DEFAULT_QUOTA_BYTES: Final = 2 << 30
"""The quota of an etcd without --quota-backend-bytes. https://etcd.io/docs/v3.5/op-guide/maintenance/#space-quota"""
_INTERVAL_S: Final = 30.0
_BACKOFF: Final = Backoff(first_s=5.0, limit_s=60.0)
_PREFIX: Final = "fleet_store_"


class EtcdSpace:
    """The largest database of the members, as they report it. etcd does not tell its quota, so a flag does."""

    def __init__(self, address: EtcdAddress, clock: Clock, *, quota_bytes: int) -> None:
        self._address = address
        self._clock = clock
        self._quota_bytes = quota_bytes
        self._largest: MemberStatus | None = None

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus text format; nothing before the first answer."""
        status = self._largest
        if status is None:
            return
        parts: tuple[MetricFamily, ...] = (
            Gauge(
                f"{_PREFIX}db_bytes",
                "Size of etcd's file, of the largest member.",
                lambda: status.db_size_bytes,
            ),
            Gauge(
                f"{_PREFIX}db_in_use_bytes",
                "The part of it that is in use.",
                lambda: status.db_size_in_use_bytes,
            ),
            Gauge(
                f"{_PREFIX}quota_bytes",
                "The size at which etcd refuses writes (--etcd-quota).",
                lambda: self._quota_bytes,
            ),
            Gauge(
                f"{_PREFIX}alarms", "Whether etcd has raised an alarm.", lambda: status.has_alarms
            ),
        )
        for part in parts:
            yield from part.lines()

    async def run(self) -> None:
        """Ask every member regularly, forever. Members that do not answer are left out."""
        if self._address.transport == "http":
            return  # sizes come over gRPC, which may not pass
        retries = Retries(_BACKOFF, self._clock)
        while True:
            from store.etcd.grpc.admin import (  # noqa: PLC0415 - see above
                MaintenanceClient,
                member_addresses,
            )

            found: list[MemberStatus] = []
            for address in member_addresses(self._address):
                client = MaintenanceClient(address)
                try:
                    found.append(await client.status())
                except StoreError as error:
                    log.debug("a member does not tell its size", extra={"why": str(error)})
                finally:
                    await client.close()
            status = max(found, key=lambda one: one.db_size_bytes, default=None)
            if status is None:
                self._largest = None  # an old size would look like a healthy one
                await retries.wait()
            else:
                self._largest = status
                retries.reset()
                await self._clock.sleep(_INTERVAL_S)
