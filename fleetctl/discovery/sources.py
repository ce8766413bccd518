"""The sources of suggestions, as the flags of a command choose them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import platformdirs

from fleetctl.discovery.suggestions import SOURCES, SourceName, SuggestionSource
from fleetctl.discovery.tailscale import Tailscale
from machinery.clock import Clock

LISTEN_S = 1.5
"""The usual time for which the local network is heard: a first and a second question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Settings of the sources."""

    names: tuple[SourceName, ...] = SOURCES
    seeds: Path | None = None
    """The file with seeds; None: the user's, if there is one."""
    listen_s: float = LISTEN_S


def source_options(command: Any) -> Any:
    """Add --seeds and --source."""
    seeds = click.option(
        "--seeds",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="FLEET_SEEDS",
        help="File with addresses of join ports, `seeds: [HOST:PORT, ...]` (default: seeds.yaml in the user's "
        "configuration folder).",
    )
    source = click.option(
        "--source",
        "source_names",
        type=click.Choice(SOURCES),
        multiple=True,
        help="Where to search; repeat it (default: all).",
    )
    return seeds(source(command))


def read_options(options: Mapping[str, Any], *, listen_s: float = LISTEN_S) -> SourceOptions:
    """Return the settings in the values of the flags."""
    names = options["source_names"] or SOURCES
    return SourceOptions(names=tuple(names), seeds=options["seeds"], listen_s=listen_s)


def make_sources(options: SourceOptions, clock: Clock) -> list[SuggestionSource]:
    """Return the sources with these names. Raises FleetctlError: the file with seeds cannot be read."""
    suggestion_sources: list[SuggestionSource] = []
    if "seeds" in options.names:
        from fleetctl.discovery import seeds  # noqa: PLC0415 - YAML, for searches alone

        own = Path(platformdirs.user_config_dir("mlx-fleet")) / "seeds.yaml"
        path = options.seeds or (own if own.exists() else None)
        suggestion_sources.append(seeds.StaticSeeds(() if path is None else seeds.read_seeds(path)))
    if "mdns" in options.names:
        from fleetctl.discovery import local_network  # noqa: PLC0415 - zeroconf takes 170 ms

        suggestion_sources.append(local_network.LocalNetwork(clock, options.listen_s))
    if "tailscale" in options.names:
        suggestion_sources.append(Tailscale())
    return suggestion_sources
