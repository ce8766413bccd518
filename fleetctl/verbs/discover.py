"""The verb `fleetctl discover`: what is heard of fleets and new machines, before it is trusted."""

import asyncio
from typing import Any

import click

from fleetctl.cli.arguments import output_option
from fleetctl.cli.documents import print_tree
from fleetctl.discovery import suggestions
from fleetctl.discovery.sources import make_sources, read_options, source_options
from fleetctl.discovery.suggestions import Findings, Suggestion
from fleetctl.output import printers
from machinery.clock import SystemClock

_TITLES = ("ROLE", "NAME", "ADDRESS", "FLEET", "SOURCE", "AGE", "NOTE")
_UID_SHOWN = 8


@click.command(short_help="List join ports, gateways and new machines that are near.")
@source_options
@click.option(
    "--timeout",
    "listen_s",
    type=click.FloatRange(0.1, 60),
    default=3.0,
    show_default=True,
    help="Seconds to listen on the local network.",
)
@output_option("table", "json")
def discover(listen_s: float, output: str, **options: Any) -> None:
    """List join ports, gateways and new machines that are heard of: seeds, local network, Tailscale.

    Nothing of it is proven: every machine of a network can announce what it likes. `fleetctl join` proves a fleet by
    TLS, and an administrator proves a new machine by its six words.
    """
    sources = make_sources(read_options(options, listen_s=listen_s), SystemClock())
    findings = asyncio.run(suggestions.collect(sources))
    if output == "json":
        print_tree({"kind": "List", "items": list(map(_tree, findings.suggestions))}, "json")
    elif findings.suggestions:
        click.echo(
            printers.align_columns(
                [_row(suggestion) for suggestion in findings.suggestions], _TITLES
            )
        )
    for problem in findings.problems:
        click.echo(f"warning: {problem}", err=True)
    if not findings.suggestions and output == "table":
        click.echo(_nothing(findings, listen_s), err=True)


def _nothing(found: Findings, listen_s: float) -> str:
    reason = (
        "" if found.problems else ". Some networks drop multicast, and it does not cross subnets"
    )
    return (
        f"Nothing was heard in {listen_s:g} s{reason}. Addresses always work: `fleetctl join TOKEN HOST:4002`, or a file "
        "with seeds"
    )


def _row(one: Suggestion) -> tuple[str, ...]:
    where = one.address.url if one.is_tls else one.address.url.replace("https://", "http://")
    age = "" if one.age_s is None else f"{one.age_s:.0f}s"
    address = where.partition("://")[2] if one.role != "gateway" else where
    if one.role == "new":
        address = one.address.host  # it serves nothing
    return (one.role, one.name, address, one.fleet[:_UID_SHOWN], one.source, age, one.note)


def _tree(one: Suggestion) -> dict[str, Any]:
    """Return the document of a suggestion for `-o json`."""
    spec: dict[str, Any] = {
        "role": one.role,
        "host": one.address.host,
        "fleet": one.fleet or None,
        "authorities": list(one.authorities),
        "source": one.source,
        "ageSeconds": None if one.age_s is None else round(one.age_s, 1),
    }
    if one.role != "new":
        spec |= {"port": one.address.port, "tls": one.is_tls}
    if one.note:
        spec["note"] = one.note
    return {"kind": "Suggestion", "metadata": {"name": one.name}, "spec": spec}
