"""`fleetctl describe`: everything about one object, with its events."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

import click

from fleetctl import apikeys, printers, proofs, reader
from fleetctl.connect import opened, run, store_options
from fleetctl.kinds import one_of
from fleetctl.selector import labels
from machinery.clock import SystemClock
from manifests import yamlio
from manifests.tree import tree_of
from reconciler.nodes import peaks
from schemas import kinds, quantity
from schemas.deployment import ModelDeployment
from schemas.event import Event
from schemas.kinds import Kind
from schemas.meta import ApiObject
from schemas.replica import Replica
from store.port import Transport


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="KIND NAME | KIND/NAME")
@store_options
def describe(what: tuple[str, ...], **options: Any) -> None:
    """Show everything about one object: spec, status, replicas, and what happened to it."""
    names = apikeys.names_of(what)
    if names is not None:
        run(apikeys.describe(names, options))
        return
    kind, name = one_of(what)
    run(_describe(kind, name, options))


async def _describe(kind: Kind, name: str, options: dict[str, Any]) -> None:
    async with opened(options) as transport:
        (obj,) = await reader.read(transport, kind, (name,))
        now = SystemClock().now()
        parts = [_head(obj, now), _section("Spec", tree_of(obj).get("spec")), _conditions(obj, now)]
        if isinstance(obj, ModelDeployment):
            parts += [_refusals(obj), await _replicas(transport, obj)]
        if isinstance(obj, Replica):
            parts.append(_proof(obj, await reader.peaks(transport, obj)))
        if kind.name == "Node":
            told = cast("dict[str, Any]", tree_of(obj).get("status") or {})
            shown = {key: value for key, value in told.items() if key != "conditions"}
            parts += [_section("Status", shown), await _assigned(transport, name)]
        parts.append(await _events(transport, obj, now))
        click.echo("\n".join(part for part in parts if part))


def _head(obj: ApiObject, now: datetime) -> str:
    meta = obj.metadata
    rows = [
        ("Name:", meta.name),
        ("Kind:", obj.kind),
        ("Labels:", ", ".join(f"{k}={v}" for k, v in sorted(labels(obj).items())) or "<none>"),
        ("Generation:", str(meta.generation)),
        ("Age:", printers.age(meta.creation_timestamp, now)),
    ]
    if meta.deletion_timestamp is not None:
        rows.append(("Deleting:", f"since {printers.age(meta.deletion_timestamp, now)}"))
    return printers.lined_up(rows)


def _section(title: str, tree: object) -> str:
    if not tree:
        return ""
    text = yamlio.dump(cast("dict[str, Any]", tree))
    return f"{title}:\n" + "".join(f"  {line}\n" for line in text.splitlines()).rstrip()


def _conditions(obj: ApiObject, now: datetime) -> str:
    status = getattr(obj, "status", None)
    if status is None or not status.conditions:
        return ""
    rows = [
        (c.type, c.status, printers.age(c.last_transition_time, now), c.reason, c.message)
        for c in status.conditions
    ]
    return _table("Conditions", ("TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"), rows)


def _refusals(deployment: ModelDeployment) -> str:
    refusals = deployment.status.refusals if deployment.status is not None else ()
    rows = [(r.node, r.reason, r.message) for r in refusals]
    return _table("Nodes that cannot take a replica", ("NODE", "REASON", "MESSAGE"), rows)


async def _replicas(transport: Transport, deployment: ModelDeployment) -> str:
    kind = kinds.by_name("Replica")
    assert kind is not None
    found = [
        obj
        for obj in await reader.read(transport, kind, ())
        if isinstance(obj, Replica) and obj.spec.deployment == deployment.name
    ]
    moment = await reader.moment(transport, SystemClock(), kind)
    text = printers.table(found, moment, is_wide=True)
    return "Replicas:\n" + _indented(text) if text else ""


async def _assigned(transport: Transport, node: str) -> str:
    """Return the replicas that are assigned to the node."""
    kind = kinds.by_name("Replica")
    assert kind is not None
    found = [
        obj
        for obj in await reader.read(transport, kind, ())
        if isinstance(obj, Replica) and any(rank.node == node for rank in obj.spec.ranks)
    ]
    moment = await reader.moment(transport, SystemClock(), kind)
    text = printers.table(found, moment, is_wide=True)
    return "Replicas:\n" + _indented(text) if text else ""


def _proof(replica: Replica, measured: Sequence[int]) -> str:
    show = quantity.show
    has_extras = any(rank.memory.extra_bytes for rank in replica.spec.ranks)
    rows = [
        (
            rank.node,
            *proofs.parts(rank.memory),
            *([proofs.extras(rank.memory)] if has_extras else ()),
            # Where spec.resources.memory counts instead, the parts do not add up to it.
            show(rank.memory.sum_bytes),
            show(rank.memory.override_bytes) if rank.memory.overridden else "-",
            show(peak) if peak else "-",
            peaks.comparison(rank.memory, peak),
        )
        for rank, peak in zip(replica.spec.ranks, measured, strict=True)
    ]
    more = ("EXTRAS",) if has_extras else ()
    titles = ("NODE", *proofs.TITLES, *more, "SUM", "OVERRIDE", "MEASURED", "")
    return _table("Memory proof", titles, rows)


async def _events(transport: Transport, obj: ApiObject, now: datetime) -> str:
    kind = kinds.by_name("Event")
    assert kind is not None
    rows = []
    for found in await reader.read(transport, kind, ()):
        spec = cast("Event", found).spec
        # Not those of an earlier object of the name; events about nodes carry no uid.
        is_of_it = spec.about.uid in ("", obj.metadata.uid)
        if (spec.about.kind, spec.about.name) == (obj.kind, obj.name) and is_of_it:
            rows.append((printers.age(spec.last_seen, now), spec.type, spec.reason, spec.message))
    return _table("Events", ("LAST SEEN", "TYPE", "REASON", "MESSAGE"), rows) or "Events: <none>"


def _table(title: str, titles: tuple[str, ...], rows: list[Any]) -> str:
    if not rows:
        return ""
    text = printers.lined_up(rows, titles)
    return f"{title}:\n{_indented(text)}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
