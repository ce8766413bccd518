"""The flags of the join port, and the port that they describe."""

import socket
from dataclasses import dataclass
from typing import Final

import click
from starlette.routing import Route

from identity.announcement import Listener
from identity.authority_folder import AuthorityFolder
from identity.credentials import Credentials
from machinery.clock import Clock
from machinery.options import Option, options
from reconciler.services.join.admission import Admission
from reconciler.services.join.port import JoinPort
from reconciler.services.join.rejoin import RejoinPort
from reconciler.services.join.requests import PendingRequests
from store.etcd.accounts import JoinedAccounts
from store.etcd.address import EtcdAddress
from store.etcd.users import Credentials as StoreCredentials
from store.events import EventRecorder
from store.port import Transport

_EVENT_SOURCE = "reconciler"


join_options: Final = options(
    "FLEET",
    Option(
        "--advertise-etcd",
        "URL of etcd for machines that join (repeat it; default: the https:// URLs of --etcd).",
        multiple=True,
        metavar="URL",
    ),
    Option(
        "--advertise-join",
        "Address of the join port in `fleetctl token create` (default: --api-host and --api-port).",
        metavar="HOST:PORT",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """Settings of the join port of a reconciler with an authority and an identity."""

    authority: AuthorityFolder
    credentials: Credentials
    signer: EtcdAddress
    """The store with the signer's user."""
    advertised: tuple[str, ...]
    """URLs of the store for machines that join."""
    announced: Listener | None
    """The announcement of the port on the local network; None for none."""

    def routes(self, transport: Transport, clock: Clock) -> tuple[list[Route], EventRecorder]:
        """Return the routes of the port, and its recorder of events, which has to run.

        `transport`: a connection to `signer`.
        """
        user = self.signer.username
        root = (
            StoreCredentials(user=user, password=self.signer.password)
            if self.authority.root_password is not None
            else None
        )
        admission = Admission(
            transport=transport,
            clock=clock,
            authority=self.authority,
            accounts=JoinedAccounts(self.signer, root),
            etcd=self.advertised,
            etcd_prefix=self.signer.prefix,
        )
        events = EventRecorder(transport, clock, source=_EVENT_SOURCE)
        port = JoinPort(admission, self.credentials, events)
        others = (RejoinPort(admission, events), PendingRequests(admission, events))
        return [*port.routes(), *(route for other in others for route in other.routes())], events


def advertised_etcd(given: tuple[str, ...], etcd: EtcdAddress) -> tuple[str, ...]:
    """Return the URLs of the store for machines that join; only TLS protects their passwords."""
    urls = tuple(url.strip() for text in given for url in text.split(",") if url.strip())
    plain = [url for url in urls if not url.startswith("https://")]
    if plain:
        raise click.UsageError(
            f"--advertise-etcd {plain[0]}: machines that join send passwords to it; write https://HOST:PORT"
        )
    return urls or tuple(url for url in etcd.endpoints if url.startswith("https://"))


def join_address(given: str | None, host: str, port: int) -> str:
    """Return the address of the join port for other machines."""
    if given:
        return given
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared with, not listened on
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
