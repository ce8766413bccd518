"""The upkeep of a process's identity while it runs: its certificate, its trust, and the TLS contexts that use them.

upkeep = IdentityUpkeep(transport, clock, folder, applicant, credentials)
group.create_task(upkeep.run())
"""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.renewal import Applicant, Renewal
from identity.trust_sync import TrustSync
from machinery.clock import Clock
from machinery.prometheus import Gauge
from store.port import Transport


class IdentityUpkeep:
    """Renews the certificate in a folder, and keeps its trust and the TLS contexts up to date.

    A process without a certificate asks for its first one, and uses it after its next start.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        folder: IdentityFolder,
        applicant: Applicant,
        credentials: Credentials | None = None,
    ) -> None:
        self.renewal: Final = Renewal(transport, clock, folder, applicant)
        self.trust: Final = TrustSync(transport, clock, folder)
        self._credentials = credentials
        self._gauges = (
            Gauge(
                "fleet_identity_certificate_expiry_timestamp_seconds",
                "End of this process's certificate, in Unix time; 0 without one.",
                lambda: _timestamp(self.renewal.not_after),
            ),
            Gauge(
                "fleet_identity_renewal_failing",
                "1 if the certificate is due and the last attempt to renew it has failed.",
                lambda: float(bool(self.renewal.failure)),
            ),
        )

    async def run(self) -> None:
        """Do the work forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.trust.run())
            group.create_task(self.renewal.run())
            if self._credentials is not None:
                group.create_task(self._credentials.watch())

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus' text format."""
        for gauge in self._gauges:
            yield from gauge.lines()


def _timestamp(time: datetime | None) -> float:
    return 0.0 if time is None else time.astimezone(UTC).timestamp()
