"""Gateways that a fleet's store listed last, in a file beside the configuration: for commands while the store is away.

The file holds addresses and identities, no secrets. A damaged file counts as empty, and a failed write is ignored.
"""

import contextlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import click
from pydantic import AwareDatetime, Field, ValidationError

from fleetctl.cli.resolve import DEFAULT_PATH, config_path
from machinery.files import write_atomically
from schemas.meta import ApiModel
from schemas.records import GatewayLease

_FILE: Final = "known-gateways.json"
_FLEETS, _GATEWAYS = 32, 16
_LIMIT_BYTES = 1 << 20
# As long as an agent serves its last assignment (ADR 0005).
_MAX_AGE: Final = timedelta(days=7)
# A list that has not changed is not written again within this time.
_FRESH: Final = timedelta(hours=1)


class KnownFleet(ApiModel):
    """The gateways of one fleet, by id, and when its store listed them."""

    store: Annotated[str, Field(max_length=4096)]
    seen: AwareDatetime
    gateways: Annotated[dict[str, GatewayLease], Field(max_length=_GATEWAYS)]


class _KnownFleets(ApiModel):
    version: Literal[1] = 1
    fleets: Annotated[tuple[KnownFleet, ...], Field(max_length=_FLEETS)] = ()


def store_name(settings: Mapping[str, Any]) -> str:
    """Return the name of the store that options, or the settings of a context, lead to."""
    named = {key.replace("-", "_"): value for key, value in settings.items()}
    if etcd := named.get("etcd"):
        return f"{','.join(sorted(etcd))} {named.get('etcd_prefix') or ''}".strip()
    folder = named.get("data_dir")
    return str(Path(folder).expanduser().absolute()) if folder else ""


class KnownGateways:
    """The file of known gateways beside one configuration file."""

    def __init__(self, config: Path) -> None:
        self._path = config.with_name(_FILE)
        self._may_create = config == Path(DEFAULT_PATH).expanduser()

    @classmethod
    def of_command(cls) -> "KnownGateways":
        """Return the file of the running command."""
        return cls(config_path(click.get_current_context(), may_be_new=True))

    def find(self, store: str, now: datetime) -> KnownFleet | None:
        """Return what the store listed last; None if that is unknown or older than a week, or comes from the future."""
        for fleet in self._read():
            if fleet.store == store and timedelta() <= now - fleet.seen < _MAX_AGE:
                return fleet
        return None

    def remember(self, store: str, gateways: Mapping[str, GatewayLease], now: datetime) -> None:
        """Save the gateways of a store; an empty list is saved, too. The longest unused fleets are dropped."""
        fleets = self._read()
        leases = dict(sorted(gateways.items())[:_GATEWAYS])
        known_fleet = next((fleet for fleet in fleets if fleet.store == store), None)
        if (
            known_fleet
            and known_fleet.gateways == leases
            and timedelta() <= now - known_fleet.seen < _FRESH
        ):
            return
        others = [fleet for fleet in fleets if fleet.store != store and now - fleet.seen < _MAX_AGE]
        others.sort(key=lambda other: other.seen, reverse=True)
        new = KnownFleet(store=store, seen=now, gateways=leases)
        tree = _KnownFleets(fleets=(new, *others[: _FLEETS - 1]))
        # The command itself does not depend on the file.
        with contextlib.suppress(OSError):
            if self._may_create:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._path.parent.is_dir():
                write_atomically(self._path, tree.model_dump_json(by_alias=True) + "\n")

    def _read(self) -> tuple[KnownFleet, ...]:
        try:
            with self._path.open("rb") as file:
                text = file.read(_LIMIT_BYTES + 1)
            return _KnownFleets.model_validate_json(text).fleets
        except (OSError, ValidationError):
            return ()
