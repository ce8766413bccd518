"""`fleetctl status`: the whole fleet on one screen, from the store and the gateways."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import click

from fleetctl.cli.arguments import output_option
from fleetctl.cli.connect import open_store, process_options, run
from fleetctl.cli.documents import tree_text
from fleetctl.fleets.dialer import open_dialer
from fleetctl.output.printers import align_columns
from fleetctl.output.problems import problem_text
from fleetctl.verbs.top import open_screen
from identity.dialer import Dialer
from insight import process_client
from insight.conditions import names_text
from insight.errors import ProcessError
from insight.fleet_caches import FleetCaches, make_fleet_caches
from insight.fleet_status import (
    FleetStatus,
    GatewayLoad,
    MacStatus,
    ModelOnMac,
    fleet_status,
)
from insight.tickets import issue_tickets
from machinery.clock import SystemClock
from schemas import sizes
from schemas.records import GatewayLease
from store import keys
from store.errors import PermissionDeniedError
from store.port import Transport

_ANSWER_S: Final = 3.0
_MOST_GATEWAYS: Final = 50
_MOST_NAMES: Final = 6
_MOST_PROBLEMS: Final = 10
_HELP = """Show the whole fleet on one screen: what is wrong, Macs with their models and load, public names, gateways.

\b
  fleetctl status
  fleetctl status -w
  fleetctl status -o json

`?` marks a value that no process reported; warnings below give the reason. FREE is the memory for models that no replica
was promised, RUNNING the requests at an engine now, WAITING those that wait at gateways. The command needs no recorder.
"""


@click.command(short_help="Show the whole fleet on one screen.", help=_HELP)
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.5, 60),
    default=2.0,
    show_default=True,
    help="Seconds between two looks with -w.",
)
@output_option("text", "json")
@process_options
def status(*, watch: bool, interval: float, output: str, **options: Any) -> None:
    """Show the whole fleet on one screen."""
    is_json = output == "json"
    if not watch:
        text, warnings = run(_once(options, is_json=is_json))
        click.echo(text)
        for warning in warnings:
            click.echo(f"warning: {warning}", err=True)
        return
    run(_follow(options, interval, is_json=is_json))


async def _once(options: dict[str, Any], *, is_json: bool) -> tuple[str, tuple[str, ...]]:
    async with open_store(options) as transport:
        caches = make_fleet_caches(transport, SystemClock())
        await caches.list_once()
        found = await _look(transport, caches, await open_dialer(options, transport))
    return _text(found, is_json=is_json), () if is_json else found.warnings


async def _follow(options: dict[str, Any], interval_s: float, *, is_json: bool) -> None:
    """Refresh the screen until Ctrl-C; while the store is away, the last state stays."""
    clock = SystemClock()
    with open_screen() as show:
        async with open_store(options) as transport:
            caches = make_fleet_caches(transport, clock)
            await caches.list_once()  # a store that is away ends the command
            dialer = await open_dialer(options, transport)
            async with asyncio.TaskGroup() as group:
                group.create_task(caches.run())
                while True:
                    found = await _look(transport, caches, dialer)
                    show(_screen_text(found, caches.staleness_s(), is_json=is_json))
                    await clock.sleep(interval_s)


def _screen_text(found: FleetStatus, age_s: float | None, *, is_json: bool) -> str:
    lines = [_text(found, is_json=is_json)]
    if not is_json:
        lines += [f"! {warning}" for warning in found.warnings]
        if age_s is not None and age_s > 10:
            lines.append(
                f"! the store has not answered for {age_s:.0f} s; this is the last known state"
            )
    return "\n".join(lines)


async def _look(transport: Transport, caches: FleetCaches, dialer: Dialer) -> FleetStatus:
    prefix = keys.GATEWAY_LEASE_PREFIX
    leases = {key.removeprefix(prefix): one for key, one in caches.gateways.items.items()}
    first = dict(sorted(leases.items())[:_MOST_GATEWAYS])
    return fleet_status(caches, await _read_loads(transport, first, dialer), SystemClock().now())


async def _read_loads(
    transport: Transport, leases: Mapping[str, GatewayLease], dialer: Dialer
) -> dict[str, GatewayLoad]:
    """Return the load of each gateway; one that does not answer has a problem instead."""
    if not leases:
        return {}
    try:
        async with issue_tickets(transport, [f"Gateway/{id_}" for id_ in leases]) as bearers:
            return await _ask_all(leases, dialer, bearers)
    except PermissionDeniedError:
        return await _ask_all(leases, dialer, {})


async def _ask_all(
    leases: Mapping[str, GatewayLease], dialer: Dialer, bearers: Mapping[str, str]
) -> dict[str, GatewayLoad]:
    async with asyncio.TaskGroup() as group:
        tasks = {
            id_: group.create_task(
                _read_load(id_, lease, dialer, bearers.get(f"Gateway/{id_}", ""))
            )
            for id_, lease in leases.items()
        }
    return {id_: task.result() for id_, task in tasks.items()}


async def _read_load(id_: str, lease: GatewayLease, dialer: Dialer, bearer: str) -> GatewayLoad:
    address = process_client.gateway_address(dialer, id_, lease)
    try:
        json = await process_client.fetch_json(
            address,
            "/api/dashboard/feed",
            bearer=bearer,
            params={"limit": "0"},
            limit_s=_ANSWER_S,
        )
        running: dict[str, int] = {}
        for one in json["running"]:
            if one["replica"]:
                running[one["replica"]] = running.get(one["replica"], 0) + 1
        waiting = {str(name): int(count) for name, count in json["waitingByModel"].items()}
        return GatewayLoad(running=running, waiting=waiting, active=int(json["active"]))
    except ProcessError as error:
        return GatewayLoad(problem=str(error))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return GatewayLoad(
            problem=f"its answer cannot be read ({error!r}); is it an older release?"
        )


def _text(found: FleetStatus, *, is_json: bool) -> str:
    if is_json:
        tree = {"apiVersion": "v1", "kind": "FleetStatus", **_tree(found)}
        return tree_text(tree, "json").rstrip("\n")
    return status_text(found)


def _tree(found: FleetStatus) -> dict[str, Any]:
    """Return the status with members in camel case."""

    def convert(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {_camel(name): value for name, value in pairs}

    return dataclasses.asdict(found, dict_factory=convert)


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(map(str.capitalize, rest))


def status_text(found: FleetStatus) -> str:
    """Return the status as text. Pure."""
    parts = [found.sentence]
    if found.problems:
        shown = [problem_text(problem) for problem in found.problems[:_MOST_PROBLEMS]]
        more = len(found.problems) - len(shown)
        hidden = [f"{more} more problems: fleetctl status -o json"] if more else []
        parts.append("\n".join((*shown, *hidden)))
    if found.macs:
        rows = [row for mac in found.macs for row in _mac_rows(mac)]
        titles = ("NODE", "CHIP", "MEMORY", "FREE", "MODELS", "READY", "RUNNING")
        parts.append(align_columns(rows, titles))
    if found.model_names:
        rows = [
            [
                public.name,
                names_text(public.deployments, _MOST_NAMES),
                f"{names_text(public.macs, _MOST_NAMES)} ({len(public.macs)})"
                if public.macs
                else "none",
                str(public.replicas),
                _count(public.waiting),
            ]
            for public in found.model_names
        ]
        parts.append(align_columns(rows, ("MODEL NAME", "SERVED BY", "NODES", "READY", "WAITING")))
    if found.loading:
        parts.append("\n".join(found.loading))
    rows = [
        [gateway.id, gateway.url, gateway.version, _count(gateway.active)]
        for gateway in found.gateways
    ]
    if rows:
        parts.append(align_columns(rows, ("GATEWAY", "URL", "VERSION", "RUNNING")))
    else:
        parts.append("no gateway is registered: start fleet-gateway")
    return "\n\n".join(parts)


def _mac_rows(mac: MacStatus) -> list[list[str]]:
    head = [
        mac.name,
        mac.chip,
        "?" if mac.memory_bytes is None else sizes.show(mac.memory_bytes),
        "?" if mac.free_bytes is None else f"{sizes.show(mac.free_bytes)} free",
    ]
    if mac.state == "offline":
        head[3] = "offline"
    elif mac.state != "online":
        head[3] += f", {mac.state}"
    if not mac.models:
        return [[*head, "-", "-", "-"]]
    first, *others = (_model_cells(model) for model in mac.models)
    return [[*head, *first], *(["", "", "", "", *other] for other in others)]


def _model_cells(one: ModelOnMac) -> list[str]:
    return [one.label, "yes" if one.is_ready else "no", _count(one.running)]


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)
