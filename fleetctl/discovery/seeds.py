"""Static seeds: addresses of join ports that a person has written down. They are enough on every network.

seeds: [control-1:4002, "192.168.7.20:4002", "[fd00::20]:4002"]
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, StringConstraints

from fleetctl.cli.errors import FleetctlError
from fleetctl.discovery.suggestions import Findings, SourceName, Suggestion
from fleetctl.fleets.join_client import JoinAddress, parse_addresses
from manifests.errors import ManifestErrors
from manifests.load import load_documents, read_model
from schemas.meta import ApiModel

MAX_SEEDS: Final = 64


class SeedsFile(ApiModel):
    """The content of the file."""

    seeds: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, max_length=300)], ...],
        Field(max_length=MAX_SEEDS),
    ]
    """HOST:PORT of join ports: names, IPv4 addresses, IPv6 addresses in brackets. The port may be left out."""


def read_seeds(path: Path) -> tuple[JoinAddress, ...]:
    """Return the addresses in a file. Raises FleetctlError."""
    try:
        found = _read_file(path.expanduser()).seeds
    except ManifestErrors as error:
        raise FleetctlError(str(error)) from error
    try:
        return tuple(dict.fromkeys(address for text in found for address in parse_addresses(text)))
    except FleetctlError as error:
        raise FleetctlError(f"{path}: {error.message}") from error


def _read_file(path: Path) -> SeedsFile:
    first, *more = load_documents([str(path)])
    if more:
        raise ManifestErrors([more[0].problem((), "a file with seeds is a single document")])
    return read_model(first, SeedsFile)


@dataclass(frozen=True, slots=True)
class StaticSeeds:
    """The source of the seeds."""

    addresses: tuple[JoinAddress, ...]

    @property
    def name(self) -> SourceName:
        """The name of the source."""
        return "seeds"

    async def suggest(self) -> Findings:
        """Return the seeds in their order."""
        return Findings(
            suggestions=tuple(
                Suggestion(source="seeds", role="control", name=address.host, address=address)
                for address in self.addresses
            )
        )
