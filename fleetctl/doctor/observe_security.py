"""Observation for the checks of connections between machines: trust and leases in the store, and files of this machine."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from insight.doctor.control_plane import is_remote
from insight.doctor.transport_security import (
    CertificateState,
    KeyState,
    TokenState,
    TransportSecurity,
)
from machinery import process_secrets
from schemas.event import Event
from schemas.node import Node, NodeLease
from schemas.records import ApiKey, GatewayLease
from schemas.replica import Endpoint
from schemas.trust import FleetTrust, IssuedCertificate, JoinTokenRecord
from schemas.wire import identity_files
from schemas.wire.join import NAME_TAKEN
from store import codec, keys, objects
from store.errors import PermissionDeniedError
from store.etcd.address import EtcdAddress
from store.port import Transport

RecordT = TypeVar("RecordT", JoinTokenRecord, ApiKey)

# Below a data folder: the files that would give a reader the fleet.
_SECRETS: Final = ("authority/ca.key", "authority/root.env")
_IDENTITIES: Final = (
    f"identities/*/{identity_files.IDENTITY}",
    f"nodes/*/identity/{identity_files.IDENTITY}",
)


async def read_security(
    transport: Transport,
    now: datetime,
    processes: tuple[Sequence[Node], Mapping[str, GatewayLease], Sequence[Endpoint]],
    here: tuple[EtcdAddress, Path | None],
) -> TransportSecurity:
    """Read what the store says about connections, and look at etcd's address and the data folder. Raises StoreError."""
    nodes, gateways, endpoints = processes
    address, data_dir = here
    item = await transport.get(keys.FLEET_TRUST)
    trust = None if item is None else codec.decode(FleetTrust, item)
    flags = []
    for lease_item in (await transport.list(keys.NODE_LEASE_PREFIX)).items:
        name = lease_item.key.removeprefix(keys.NODE_LEASE_PREFIX)
        lease = codec.decode(NodeLease, lease_item)
        flags += [f"node/{name}: {flag}" for flag in lease.insecure_flags]
    for id_, gateway in gateways.items():
        flags += [f"gateway/{id_}: {flag}" for flag in gateway.insecure_flags]
    # Those of gateways are checked with the gateways.
    listeners = [
        (f"node/{node.name}", node.status.agent_url) for node in nodes if node.status is not None
    ] + [(f"replica/{endpoint.name}", endpoint.spec.url) for endpoint in endpoints]
    tokens = await _read_secrets(transport, keys.JOIN_TOKEN_PREFIX, JoinTokenRecord)
    api_keys = await _read_secrets(transport, keys.API_KEY_PREFIX, ApiKey)
    events = await objects.list_all(transport, Event)
    return TransportSecurity(
        mode=None if trust is None else trust.mode,
        plain=tuple(f"{label} at {url}" for label, url in listeners if is_plain_and_remote(url)),
        insecure_flags=tuple(flags),
        plain_etcd=plain_etcd_urls(address),
        open_secrets=find_open_secrets(data_dir),
        certificates=await _read_certificates(transport, trust, now),
        tokens=tuple(
            TokenState(id=token.id, left=token.expires - now, uses=token.uses_left)
            for token in tokens
        ),
        api_keys=tuple(
            KeyState(name=key.name, left=key.expires - now)
            for key in api_keys
            if key.expires is not None
        ),
        refused_names=tuple(e.spec.message for e in events if e.spec.reason == NAME_TAKEN),
    )


def is_plain_and_remote(url: str) -> bool:
    """Return whether other machines reach the URL, and read what is sent."""
    return url.startswith("http://") and is_remote(urlsplit(url).hostname or "")


async def _read_secrets(transport: Transport, prefix: str, type_: type[RecordT]) -> list[RecordT]:
    """Return the records below a prefix; none if this user may not read secrets."""
    try:
        items = (await transport.list(prefix)).items
    except PermissionDeniedError:
        return []
    return [codec.decode(type_, item) for item in items]


async def _read_certificates(
    transport: Transport, trust: FleetTrust | None, now: datetime
) -> tuple[CertificateState, ...]:
    authorities = (
        [] if trust is None else x509.load_pem_x509_certificates(trust.authorities.encode())
    )

    def is_issued_by(pem: str, authority: x509.Certificate) -> bool:
        try:
            x509.load_pem_x509_certificate(pem.encode()).verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    states = []
    for item in (await transport.list(keys.ISSUED_PREFIX)).items:
        issued = codec.decode(IssuedCertificate, item)
        states.append(
            CertificateState(
                label=item.key.removeprefix(keys.ISSUED_PREFIX),
                left=issued.not_after - now,
                is_foreign=not any(
                    is_issued_by(issued.certificate, certificate) for certificate in authorities
                ),
            )
        )
    return tuple(states)


def plain_etcd_urls(address: EtcdAddress) -> tuple[str, ...]:
    """Return the URLs of etcd at which passwords go over the network in clear."""
    return tuple(url for url in address.endpoints if is_plain_and_remote(url))


def find_open_secrets(data_dir: Path | None) -> tuple[str, ...]:
    """Return the files below the fleet's data folder that other users may read, each with its remedy."""
    return tuple(why for path in _secret_files(data_dir) if (why := _open_reason(path)))


def _secret_files(data_dir: Path | None) -> tuple[Path, ...]:
    if data_dir is None:
        return ()
    identities = (path for pattern in _IDENTITIES for path in sorted(data_dir.glob(pattern)))
    return (*(data_dir / name for name in _SECRETS), *identities)


def close_open_secrets(data_dir: Path | None) -> tuple[Path, ...]:
    """Take the rights of other users away from the files with secrets; return the files that were changed.

    Raises:
        OSError: a file belongs to another user.

    """
    changed = []
    for path in _secret_files(data_dir):
        if _open_reason(path):
            path.chmod(0o600)
            changed.append(path)
    return tuple(changed)


def _open_reason(path: Path) -> str:
    try:
        process_secrets.check_secret_file(path)
    except process_secrets.OpenSecretError as error:
        return str(error)
    except OSError:
        return ""  # there is none
    return ""
