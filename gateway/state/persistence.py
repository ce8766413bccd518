"""Gateway snapshot: the file with which a gateway starts without the store. Its content is validated when it is read.

The file holds the store's documents unchanged, each with its stored version.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import orjson

from machinery.files import write_atomically
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import ApiModel
from schemas.records import ApiKey
from schemas.replica import Endpoint
from schemas.route import ModelRoute
from store import codec
from store.port import KeyValue

M = TypeVar("M", bound=ApiModel)
log = logging.getLogger(__name__)

FORMAT = 1
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownObjects:
    """Objects of the store by name."""

    deployments: Mapping[str, ModelDeployment] = field(default_factory=lambda: _NONE)
    statuses: Mapping[str, ModelDeploymentStatus] = field(default_factory=lambda: _NONE)
    routes: Mapping[str, ModelRoute] = field(default_factory=lambda: _NONE)
    endpoints: Mapping[str, tuple[Endpoint, int]] = field(default_factory=lambda: _NONE)
    """By key below `endpoint/`, with the revision of the last write."""
    sites: Mapping[str, str] = field(default_factory=lambda: _NONE)
    """By node; known only to gateways that have a site themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySnapshot:
    """The state that a start without the store needs."""

    saved_at: datetime
    known: KnownObjects
    keys: Mapping[str, ApiKey] | None = None
    """API keys by name; None if they could not be read."""
    gateways: int = 1
    """The number of gateways, which share rates."""


class SnapshotError(ValueError):
    """The file cannot be used; the message says why."""


class SnapshotFile:
    """The snapshot file in the gateway's state folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "known.json"
        self._told = ""

    def read(self) -> GatewaySnapshot | None:
        """Return the last snapshot; None if there is no usable one, which is logged."""
        try:
            return decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, SnapshotError) as error:
            log.warning(
                "cannot use the saved fleet state; starting without it",
                extra={"path": str(self._path), "why": str(error)},
            )
            return None

    def save(self, snapshot: GatewaySnapshot) -> None:
        """Replace the file. A failure is logged once and stops nothing."""
        try:
            write_atomically(self._path, encode(snapshot).decode(), mode=0o600)
        except OSError as error:
            if str(error) != self._told:
                log.warning(
                    "cannot save the fleet state for a start without etcd",
                    extra={"path": str(self._path), "why": str(error)},
                )
            self._told = str(error)
            return
        self._told = ""


def encode(snapshot: GatewaySnapshot) -> bytes:
    """Return the content of the file."""
    known, keys = snapshot.known, snapshot.keys
    tree = {
        "format": FORMAT,
        "savedAt": snapshot.saved_at.isoformat(),
        "deployments": _encoded(known.deployments),
        "statuses": _encoded(known.statuses),
        "routes": _encoded(known.routes),
        "endpoints": {
            key: [version, codec.encode(endpoint).decode()]
            for key, (endpoint, version) in known.endpoints.items()
        },
        "sites": dict(known.sites),
        "keys": None if keys is None else _encoded(keys),
        "gateways": snapshot.gateways,
    }
    return orjson.dumps(tree)


def decode(raw: bytes) -> GatewaySnapshot:
    """Return the snapshot in the file's content.

    Raises:
        SnapshotError: the content is invalid or of another format version.

    """
    try:
        tree = orjson.loads(raw)
        written = tree["format"]
        if written != FORMAT:
            raise SnapshotError(f"it has format {written}, and this release reads {FORMAT}")
        return GatewaySnapshot(
            saved_at=datetime.fromisoformat(tree["savedAt"]),
            known=KnownObjects(
                deployments=_decoded(ModelDeployment, tree["deployments"]),
                statuses=_decoded(ModelDeploymentStatus, tree["statuses"]),
                routes=_decoded(ModelRoute, tree["routes"]),
                endpoints={
                    key: (_document(Endpoint, key, text), int(version))
                    for key, (version, text) in tree["endpoints"].items()
                },
                sites={str(node): str(site) for node, site in tree.get("sites", {}).items()},
            ),
            keys=None if tree["keys"] is None else _decoded(ApiKey, tree["keys"]),
            gateways=int(tree["gateways"]),
        )
    except codec.UndecodableError as error:
        raise SnapshotError(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"it is garbled ({type(error).__name__})") from error


def _encoded(found: Mapping[str, ApiModel]) -> dict[str, str]:
    return {name: codec.encode(one).decode() for name, one in found.items()}


def _decoded(model: type[M], found: Mapping[str, str]) -> dict[str, M]:
    return {name: _document(model, name, text) for name, text in found.items()}


def _document(model: type[M], name: str, text: str) -> M:
    return codec.decode(model, KeyValue(name, text.encode(), 0, 0))
