"""`fleetctl get tiers`: the public model names, with the Macs and replicas behind each and their tokens per second."""

import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import click

from fleetctl.cli.connect import open_store, run
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.dialer import open_dialer
from fleetctl.output import printers, usage_tables
from fleetctl.verbs.top import TopQuery, sample_pairs
from insight import usage
from insight.fleet_caches import make_fleet_caches
from insight.fleet_status import TierStatus, external_counts, names_text, tiers
from insight.usage import Figure
from machinery.clock import SystemClock
from manifests.suggestions import nearest

_TITLES = ("NAME", "MODELS", "NODES", "REPLICAS", "TOKENS/S")
_OVER_S = 1.0
"""The time over which tokens are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """One public name."""

    tier: TierStatus
    external: int
    """Servers outside the fleet behind it."""
    tokens_per_second: Figure
    """Of its deployments: all their requests, whatever name they used."""

    def cells(self) -> tuple[str, ...]:
        replicas = str(self.tier.replicas)
        return (
            self.tier.name,
            names_text(self.tier.deployments),
            f"{names_text(self.tier.macs)} ({len(self.tier.macs)})" if self.tier.macs else "none",
            f"{replicas} and {self.external} external" if self.external else replicas,
            usage_tables.figure_text(self.tokens_per_second, lambda value: f"{value:.1f}"),
        )

    def tree(self) -> dict[str, Any]:
        return {
            "name": self.tier.name,
            "deployments": list(self.tier.deployments),
            "nodes": list(self.tier.macs),
            "replicas": self.tier.replicas,
            "external": self.external,
            "tokensPerSecond": self.tokens_per_second.value,
        }


def show(names: Sequence[str], options: dict[str, Any]) -> None:
    """Print the tiers of these names, or all."""
    output = options["output"]
    if output not in ("table", "wide", "json", "name"):
        raise click.UsageError("tiers are printed as table, wide, json or name")
    if options["watch"] or options["watch_only"]:
        raise click.UsageError("tiers cannot be watched; `fleetctl status -w` shows them live")
    found, reasons = run(_read(options, is_measured=output != "name"))
    found = _named(found, names)
    if output == "json":
        click.echo(json.dumps({"kind": "List", "items": [one.tree() for one in found]}, indent=2))
    elif output == "name":
        for one in found:
            click.echo(f"tier/{one.tier.name}")
    elif found:
        titles = () if options["no_headers"] else _TITLES
        click.echo(printers.align_columns([one.cells() for one in found], titles))
    else:
        click.echo("No model has a name: nothing is deployed.", err=True)
    for reason in reasons:
        click.echo(f"warning: {reason}", err=True)


def _named(found: Sequence[TierRow], names: Sequence[str]) -> list[TierRow]:
    """Return the rows of these names, all without any.

    Raises:
        FleetctlError: there is no such name.

    """
    known = {one.tier.name: one for one in found}
    for name in names:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            raise FleetctlError(f"no model answers to the name {name}{hint}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(found)


async def _read(
    options: dict[str, Any], *, is_measured: bool
) -> tuple[list[TierRow], tuple[str, ...]]:
    async with open_store(options) as transport:
        caches = make_fleet_caches(transport, SystemClock())
        await caches.list_once()
        external = external_counts(caches)
        speeds: dict[str, Figure] = {}
        reasons: tuple[str, ...] = ()
        if is_measured:
            query = TopQuery(
                is_nodes=False,
                names=(),
                selector=(),
                order="name",
                over_s=_OVER_S,
                is_json=False,
                headers=False,
                dialer=await open_dialer(options, transport),
            )
            async with aclosing(sample_pairs(transport, SystemClock(), query)) as pairs:
                pair = await anext(pairs)
            speeds = {one.name: one.tokens_per_second for one in usage.model_rows(*pair)}
            reasons = usage.model_reasons(pair[1])
    rows = [
        TierRow(
            tier=one,
            external=external.get(one.name, 0),
            tokens_per_second=_sum(one.deployments, speeds),
        )
        for one in tiers(caches)
    ]
    return rows, reasons


def _sum(deployments: Sequence[str], speeds: Mapping[str, Figure]) -> Figure:
    """Return the sum over the deployments; incomplete if one is unknown."""
    found = [speeds.get(one, usage.UNKNOWN) for one in deployments]
    known = [one.value for one in found if one.value is not None]
    if found and not known:
        return usage.UNKNOWN
    return Figure(value=sum(known), is_complete=all(one.is_complete for one in found))
