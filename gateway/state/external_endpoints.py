"""External endpoints of routes as endpoints that can be tried. Pure."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gateway.routing.table import (
    DEFAULT_CHECKS,
    EngineEndpoint,
    ExternalServer,
    check_policy,
)
from schemas.external import ExternalEndpoint, parse_url
from schemas.records import ExternalKey
from schemas.route import ModelRoute
from schemas.wire.engine_address import SYSTEM_AUTHORITIES, EngineAddress

_LABEL = "external/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalBackends:
    """The external endpoints of one route, by name."""

    usable: Mapping[str, EngineEndpoint] = field(default_factory=lambda: MappingProxyType({}))
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Reasons why the others are not used."""


def external_backends(route: ModelRoute, keys: Mapping[str, ExternalKey]) -> ExternalBackends:
    """Return the external endpoints of the route. `keys`: those that the gateway may send, by name."""
    usable, reasons = {}, {}
    for declared in route.spec.external:
        key = None if declared.key is None else keys.get(declared.key)
        reason = _unusable_reason(declared, key)
        if reason:
            reasons[declared.name] = reason
        else:
            address, routing = parse_url(declared.url), route.spec.routing
            name = f"{route.name}/{declared.name}"
            secret = "" if key is None else key.key.get_secret_value()
            authorities = (declared.authorities or SYSTEM_AUTHORITIES) if address.is_tls else ""
            identity = f"{declared.url}\0{declared.model}\0{secret}\0{authorities}"
            usable[declared.name] = EngineEndpoint(
                replica=name,
                node=address.host,
                deployment=backend_label(declared.name),
                origin=EngineAddress(
                    address.host, address.port, external=name, authorities=authorities
                ),
                names=(declared.model,),
                version=zlib.crc32(identity.encode()),
                concurrency=declared.concurrency,
                checks=DEFAULT_CHECKS if routing is None else check_policy(routing.health_check),
                external=ExternalServer(
                    path=address.path,
                    model=declared.model,
                    authorization=f"authorization: Bearer {secret}\r\n".encode("ascii")
                    if secret
                    else b"",
                ),
            )
    return ExternalBackends(usable=usable, reasons=reasons)


def backend_label(name: str) -> str:
    """Return what stands for an external endpoint where deployments are named; no deployment has such a name."""
    return _LABEL + name


def is_backend_label(name: str) -> bool:
    """Return whether the name stands for an external endpoint."""
    return name.startswith(_LABEL)


def _unusable_reason(declared: ExternalEndpoint, key: ExternalKey | None) -> str:
    """Return why the endpoint cannot be used; empty if it can."""
    if declared.key is None:
        return ""
    if key is None:
        return (
            f"external endpoint {declared.name}: there is no externalkey {declared.key}; store it with `fleetctl create "
            f"externalkey {declared.key} --url {declared.url} --token-file FILE`"
        )
    address = parse_url(declared.url)
    # Otherwise whoever may write routes could send the key anywhere.
    if parse_url(key.url).origin != address.origin:
        return (
            f"external endpoint {declared.name}: externalkey {declared.key} is for {parse_url(key.url).origin} only, "
            f"not for {address.origin}"
        )
    return ""
