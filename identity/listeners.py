"""Security of the listeners of processes with an identity: TLS for their peers, and plain HTTP as the fleet's mode allows."""

from dataclasses import dataclass
from typing import Any, Final

from identity.credentials import Credentials
from identity.metrics_access import INSECURE_METRICS, MetricsToken, read_metrics_token
from identity.names import Role
from machinery.http_server import ServerSecurity
from machinery.options import Option, options
from machinery.tls_server import TlsOptions
from schemas.trust import TlsMode
from schemas.wire.errors import Refusal

INSECURE_HTTP: Final = "--insecure-http"
"""The flag that lets a process without an identity serve plain HTTP to other machines."""
_ADMIN_HANDSHAKES = 32
_TLS_REQUIRED = Refusal(
    status=400,
    message="This fleet refuses plain HTTP (TLS mode strict). Use https:// and the fleet's authority (ca.pem).",
    code="https_required",
)


def server_security(
    credentials: Credentials | None, roles: frozenset[Role], *, is_insecure: bool
) -> ServerSecurity:
    """Return the security of an admin server. A client needs no certificate, but if it has one, with one of the roles.

    `is_insecure`: --insecure-http was given.
    """
    if credentials is None:
        return ServerSecurity(insecure_flag=INSECURE_HTTP, is_insecure=is_insecure)
    peers = credentials.server(roles, is_optional=True)
    options = TlsOptions(
        certificate=peers,
        plain_response=_TLS_REQUIRED.http_response(),
        accepts_plain=lambda: credentials.mode is not TlsMode.STRICT,
        unfinished_handshakes=_ADMIN_HANDSHAKES,
    )
    return ServerSecurity(
        acceptor=options.acceptor, is_https=lambda: credentials.mode is not TlsMode.PERMISSIVE
    )


insecure_http_flag: Final = options(
    "FLEET",
    Option(
        INSECURE_HTTP,
        "Serve plain HTTP to other machines without an identity. They can read everything on the network.",
        is_flag=True,
    ),
)
"""Adds --insecure-http to an agent or a reconciler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSecurity:
    """The flags that protect the API of an agent or a gateway."""

    is_insecure: bool = False
    """True with --insecure-http."""
    metrics_token: MetricsToken | None = None
    has_open_metrics: bool = False
    """True with --insecure-metrics."""

    @property
    def insecure_flags(self) -> tuple[str, ...]:
        """The flags in use that switch protection off, for `fleetctl doctor`."""
        given = {INSECURE_HTTP: self.is_insecure, INSECURE_METRICS: self.has_open_metrics}
        return tuple(flag for flag, is_given in given.items() if is_given)


def api_security(options: dict[str, Any]) -> ApiSecurity:
    """Return what the flags say (--insecure-http, `metrics_flags`).

    Raises:
        click.UsageError: a file cannot be used.

    """
    return ApiSecurity(
        is_insecure=options["insecure_http"],
        metrics_token=read_metrics_token(options["metrics_token_file"]),
        has_open_metrics=options["insecure_metrics"],
    )
