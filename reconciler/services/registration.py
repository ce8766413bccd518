"""Registration of this reconciler in the store, leading or not: Prometheus and `fleetctl init-auth` find them by it.

Leading does not depend on it: a leader whose registration the store refuses goes on.
"""

import hashlib
from collections.abc import Callable

from identity.credentials import TlsReporter, no_report
from machinery.clock import Clock
from schemas.records import ReconcilerLease
from store import codec, keys
from store.leases import hold_published
from store.port import Transport


class ReconcilerRegistration:
    """Keeps the reconciler's key under a lease for as long as the process runs."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        lease: ReconcilerLease,
        tls: TlsReporter = no_report,
        url: Callable[[], str] = str,
    ) -> None:
        """`tls` reports the TLS of this process, `url` the address of its port; the lease follows both."""
        self._transport = transport
        self._clock = clock
        self._lease = lease
        self._tls = tls
        self._url = url
        # An identity holds a slash and a space; the key is a digest, the document has the text.
        self.id = hashlib.sha256(lease.identity.encode()).hexdigest()[:12]
        """The name of the key below `lease/Reconciler/`."""
        self._key = keys.named(keys.RECONCILER_LEASE_PREFIX, self.id)

    async def run(self) -> None:
        """Hold a lease forever, replacing a lost one; revoke it at the end."""
        await hold_published(self._transport, self._clock, self._key, self._value)

    def _value(self) -> bytes:
        return codec.encode(self._lease.model_copy(update={"tls": self._tls(), "url": self._url()}))
