"""Limits and options of one gateway. Values only."""

from dataclasses import dataclass, field
from pathlib import Path

from gateway.auth.rate_limits import Limits
from gateway.batches.runner import GONE_KEY_S
from gateway.floating_address.holder import FloatingAddress
from gateway.forwarding.admission import KEEP_ALIVE_S
from gateway.forwarding.model_state import ModelStates
from gateway.forwarding.policy import HOLD_S, RECOVERY_S, SILENCE_S
from gateway.http.cors import AllowedHosts, AllowedOrigins
from gateway.workers import WorkerPlace
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.listeners import ApiSecurity
from machinery.clock import Clock
from machinery.process_log import LogRing
from machinery.tls_server import ServerCertificate
from machinery.version import version
from schemas.records import GatewayLease
from schemas.trust import TlsMode


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Limits and options of one gateway."""

    max_body_bytes: int = 8 << 20
    max_body_memory_bytes: int = 256 << 20
    """Memory of the request bodies of all connections."""
    max_connections_per_address: int | None = None
    """Connections of one client address; 0: no limit. None: 1,024, and no limit for this machine."""
    max_files: int = 0
    """The limit of open files; 0: none."""
    request_timeout_s: float = SILENCE_S
    """The longest time without progress of an engine."""
    send_timeout_s: float = 30.0
    """The longest time that a client may read nothing of its response."""
    yield_timeout_s: float = 5.0
    """The time after which a client that reads nothing loses its engine's slot to others that wait for it."""
    drain_timeout_s: float = 30.0
    hold_timeout_s: float = HOLD_S
    """The longest wait of a request for a first replica or a free slot, where `queueing.coldStart` does not say."""
    keep_alive_s: float = KEEP_ALIVE_S
    """Interval of keep-alive events to a client that waits for a slot or a replica."""
    hold_limit: int = 64
    """The number of requests that may wait for one model, for each of its ready replicas."""
    store_wait_limit: int = 1024
    """The number of requests that may wait for the first routing table."""
    resume_timeout_s: float = RECOVERY_S
    """The longest wait for another engine, of a stream whose engine died, and of a request for a deployment whose
    replicas are all starting again, where `queueing.coldStart` does not say."""
    certificate: ServerCertificate | None = None
    """Certificate for clients; None: plain HTTP."""
    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    """Host names by which clients may address the gateway."""
    origins: AllowedOrigins = field(default_factory=AllowedOrigins)
    """Web origins that may use the gateway."""
    asks_for_keys: bool = False
    """True if requests need an API key."""
    anonymous: Limits | None = None
    """Limits of each client without a key, by address; None: none."""
    state_dir: Path | None = None
    """Folder for the state that a start without the store needs; None: not saved."""
    gone_key_s: float = GONE_KEY_S
    """Seconds after which the files, batches and responses of a deleted key go."""
    site: str = ""
    """Site of the gateway; engines of the same site are preferred."""
    default_model: str = ""
    """Model of requests that name none; empty: the only one there is."""
    has_compat_names: bool = False
    """True if names of mlx-serving are used, too."""
    engine_sockets: Path | None = None
    """Folder of the sockets of engines on this machine; None: endpoints with sockets are not used."""
    journal_size: int = 10_000
    """The number of requests that the journal keeps in memory."""
    journal_file: Path | None = None
    """File for the journal of all requests; None: not written."""
    saved_journal: Path | None = None
    """File with the last requests, which are read at the start; None: the journal begins empty."""
    ring: LogRing = field(default_factory=LogRing)
    """The last lines of the gateway's own log."""
    has_store_password: bool = False
    """True if the gateway has a password for the store, whether or not the store requires one."""
    identity_folder: IdentityFolder | None = None
    """The folder of the gateway's certificate, which is renewed there; None: the gateway has none."""
    identity_addresses: tuple[str, ...] = ()
    """IP addresses and names by which clients reach the gateway, for its certificate."""
    credentials: Credentials | None = None
    """The gateway's certificate and key for connections within the fleet; None: no TLS."""
    accepts_plain: bool = True
    """True if clients may speak plain HTTP where only a certificate of the fleet is served."""
    security: ApiSecurity = field(default_factory=ApiSecurity)
    """The flags that protect metrics, or switch protection off."""
    is_announced: bool = False
    """True if the process announces itself on its local networks."""
    place: WorkerPlace | None = None
    """The gateway's place among the workers of --workers; None: it is the only process."""
    floating: FloatingAddress | None = None
    """An address for clients that the gateways of the fleet hold in turn; None: this one takes no part."""

    def model_states(self, clock: Clock) -> ModelStates:
        """Return the state of models with these limits as defaults."""
        return ModelStates(
            clock,
            silence_s=self.request_timeout_s,
            recovery_s=self.resume_timeout_s,
            hold_s=self.hold_timeout_s,
            keep_alive_s=self.keep_alive_s,
        )

    def lease(self, url: str) -> GatewayLease:
        """Return the gateway's registration. Processes of the fleet dial TLS from mode tls on."""
        own = self.credentials
        if own is not None and self.certificate is None:
            is_plain = self.accepts_plain and own.mode is TlsMode.PERMISSIVE
            url = f"{'http' if is_plain else 'https'}://{url.partition('://')[2]}"
        return GatewayLease(
            url=url,
            version=version(),
            asks_for_keys=self.asks_for_keys,
            has_store_password=self.has_store_password,
            tls=None if own is None else own.report(),
            insecure_flags=self.security.insecure_flags,
            is_announced=self.is_announced,
        )
