"""`fleetctl describe`: everything about objects, with related objects and events. Changes nothing."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar, cast

import click

from fleetctl.cli import arguments, terminal
from fleetctl.cli.connect import gateway_options, open_store, run
from fleetctl.fleets import api_keys
from fleetctl.objects import reader, targets
from fleetctl.objects.kind_args import WITH_API_KEYS, kind_of
from fleetctl.objects.node_pools import read_node_pools
from fleetctl.objects.selectors import selectable_labels
from fleetctl.objects.targets import Selection
from fleetctl.output import printers
from fleetctl.output.problems import problem_text
from fleetctl.verbs.routes import describe_requests
from insight import memory_proof
from insight.conditions import ObjectCondition
from insight.fleet_caches import make_fleet_caches
from insight.root_cause import find_problems
from machinery.clock import SystemClock
from manifests.declaration import clean_manifest
from manifests.trees import object_tree
from manifests.yaml import parser
from reconciler.nodes.wired_limits import limit_text
from reconciler.placement import memory_proof as placement_memory_proof
from schemas import duration, quantity, sizes
from schemas.deployment import ModelDeployment
from schemas.event import Event
from schemas.gitsource import Drift, GitCommit, GitSource
from schemas.meta import ApiObject, ManagedFieldsEntry, is_true
from schemas.model_snapshot import ModelSnapshot
from schemas.modelpolicy import ModelPolicy, ModelPolicyStatus
from schemas.node import Node
from schemas.pools import NodePool, in_pool, selects
from schemas.replica import Replica
from schemas.route import Backend, ModelRoute
from schemas.shardgroup import FabricCheck, ShardGroup
from store import codec, keys
from store.port import Transport

# Enough for a writer that changes single fields. A manifest can have hundreds of fields.
_FIELDS_SHOWN = 12


def header(obj: ApiObject, now: datetime) -> str:
    """Return the section with the metadata."""
    meta = obj.metadata
    rows = [
        ("Name:", meta.name),
        ("Kind:", obj.kind),
        ("Labels:", _pairs_text(selectable_labels(obj))),
        ("Annotations:", _pairs_text(meta.annotations)),
        ("Generation:", str(meta.generation)),
        ("Age:", printers.age(meta.creation_timestamp, now)),
    ]
    if meta.owner_references:
        owners = ", ".join(
            f"{reference.kind.lower()}/{reference.name}" for reference in meta.owner_references
        )
        rows.append(("Owned by:", owners))
    if meta.deletion_timestamp is not None:
        waits = f", waiting for {', '.join(meta.finalizers)}" if meta.finalizers else ""
        rows.append(("Deleting:", f"since {printers.age(meta.deletion_timestamp, now)}{waits}"))
    return printers.align_columns(rows)


def yaml_section(title: str, tree: object) -> str:
    """Return a part of an object as YAML below a title."""
    if not tree:
        return ""
    text = parser.dump(cast("dict[str, Any]", tree))
    return f"{title}:\n" + "".join(f"  {line}\n" for line in text.splitlines()).rstrip()


def condition_section(obj: ApiObject, now: datetime) -> str:
    """Return the conditions of the status."""
    status = getattr(obj, "status", None)
    if status is None or not status.conditions:
        return ""
    rows = [
        (c.type, c.status, printers.age(c.last_transition_time, now), c.reason, c.message)
        for c in status.conditions
    ]
    return table_section("Conditions", ("TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"), rows)


async def problem_section(transport: Transport, obj: ApiObject) -> str:
    """Return what is wrong with the object, with its root cause in the fleet. Raises StoreError."""
    status = getattr(obj, "status", None)
    conditions = () if status is None else status.conditions
    is_well = not any(ObjectCondition(obj.kind, obj.name, each).is_problem for each in conditions)
    # The life of a node is in another document.
    if is_well and not isinstance(obj, Node):
        return ""
    caches = make_fleet_caches(transport, SystemClock())
    await caches.list_once()
    problems = [p for p in find_problems(caches) if p.concerns(obj.kind, obj.name)]
    return titled("Problems", "\n".join(problem_text(one, is_described=True) for one in problems))


def owner_section(obj: ApiObject, now: datetime) -> str:
    """Return the owners of fields, which apply respects (docs/adr/0013-three-way-apply.md)."""
    rows = [
        (entry.manager, entry.operation, printers.age(entry.time, now), _fields_text(entry))
        for entry in sorted(
            obj.metadata.managed_fields, key=lambda field: (field.operation, field.manager)
        )
    ]
    return table_section("Field owners", ("MANAGER", "BY", "AGE", "FIELDS"), rows)


def table_section(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table below a title; empty without rows."""
    if not rows:
        return ""
    return titled(title, printers.align_columns(rows, titles))


def titled(title: str, text: str) -> str:
    """Return a text below a title; empty without text."""
    return f"{title}:\n{_indent(text)}" if text else ""


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _pairs_text(values: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(values.items())) or "<none>"


def _fields_text(one: ManagedFieldsEntry) -> str:
    if one.operation == "Apply":
        return "the fields of its manifest"
    more = len(one.fields) - _FIELDS_SHOWN
    return ", ".join(one.fields[:_FIELDS_SHOWN]) + (f" and {more} more" if more > 0 else "")


Obj = TypeVar("Obj", bound=ApiObject)
_SHORT_HASH = 12
_CHECK_TITLES = ("AGE", "RESULT", "SPEED", "USUAL", "MACS", "REASON", "MESSAGE")
_CHECK_ROLES: dict[str, terminal.Role] = {"Healthy": "good", "Unhealthy": "bad", "Failed": "warn"}
_NODES_SHOWN = 20


async def kind_sections(transport: Transport, obj: ApiObject, now: datetime) -> list[str]:
    """Return the sections that are special to the object's kind; they may be empty. Raises StoreError."""
    parts: list[str] = []
    match obj:
        case ModelDeployment():
            replicas = await _replica_section(
                transport, lambda one: one.spec.deployment == obj.name
            )
            fetches = await _fetch_section(transport, obj.name)
            files = await _file_section(transport, obj)
            parts = [_refusal_section(obj), replicas, fetches, files]
        case Replica():
            measured = await reader.read_peaks(transport, obj)
            show = quantity.show
            has_extras = any(rank.memory.extra_bytes for rank in obj.spec.ranks)
            rows = [
                (
                    rank.node,
                    *memory_proof.part_texts(rank.memory),
                    *([memory_proof.extra_text(rank.memory)] if has_extras else ()),
                    # With an override by spec.resources.memory, the parts do not add up to it.
                    show(rank.memory.sum_bytes),
                    show(rank.memory.override_bytes) if rank.memory.overridden else "-",
                    show(peak) if peak else "-",
                    placement_memory_proof.compare_with_peak(rank.memory, peak),
                )
                for rank, peak in zip(obj.spec.ranks, measured, strict=True)
            ]
            more = ("EXTRAS",) if has_extras else ()
            titles = ("NODE", *memory_proof.TITLES, *more, "SUM", "OVERRIDE", "MEASURED", "")
            proof = table_section("Memory proof", titles, rows)
            parts = [proof, _fetch_table([obj])]
        case Node():
            parts = await _node_sections(transport, obj)
        case NodePool():
            nodes = [node for node in await _read_all(transport, Node) if in_pool(obj, node)]
            parts = [await _node_table(transport, "Nodes", nodes)]
        case ShardGroup():
            parts = await _group_sections(transport, obj, now)
        case ModelRoute():
            parts = [await _backend_section(transport, obj)]
        case ModelPolicy(status=ModelPolicyStatus(refusals=refusals)) if refusals:
            titles = ("REPOSITORY", "REASON", "AGE", "MESSAGE")
            rows = [(r.repo, r.reason, printers.age(r.at, now), r.message) for r in refusals]
            parts = [table_section("Refused", titles, rows)]
        case GitSource():
            parts = _source_sections(obj, now)
        case _:
            pass
    return parts


async def _node_sections(transport: Transport, node: Node) -> list[str]:
    status = cast("dict[str, Any]", object_tree(node).get("status") or {})
    shown = {key: value for key, value in status.items() if key != "conditions"}
    assigned = await _replica_section(
        transport, lambda one: any(rank.node == node.name for rank in one.spec.ranks)
    )
    return [yaml_section("Status", shown), *await _pool_lines(transport, node), assigned]


async def event_section(transport: Transport, obj: ApiObject, now: datetime) -> str:
    """Return the events of the object. Raises StoreError."""
    rows = []
    for event in await _read_all(transport, Event):
        spec = event.spec
        # Skip events of a deleted object of the same name. Events about nodes have no uid.
        is_of_it = spec.about.uid in ("", obj.metadata.uid)
        if (spec.about.kind, spec.about.name) == (obj.kind, obj.name) and is_of_it:
            rows.append((printers.age(spec.last_seen, now), spec.type, spec.reason, spec.message))
    titles = ("LAST SEEN", "TYPE", "REASON", "MESSAGE")
    return table_section("Events", titles, rows) or "Events: <none>"


async def _read_all(transport: Transport, type_: type[Obj]) -> list[Obj]:
    return cast("list[Obj]", await reader.read(transport, kind_of(type_.__name__), ()))


async def _replica_section(transport: Transport, is_of_it: Callable[[Replica], bool]) -> str:
    replicas = [replica for replica in await _read_all(transport, Replica) if is_of_it(replica)]
    context = await reader.table_context(transport, SystemClock(), kind_of("Replica"))
    return titled("Replicas", printers.table(replicas, context, is_wide=True))


async def _node_table(transport: Transport, title: str, found: Sequence[Node]) -> str:
    context = await reader.table_context(transport, SystemClock(), kind_of("Node"))
    trees = [object_tree(node) for node in found]
    context = context._replace(node_pools=await read_node_pools(transport, trees))
    return titled(title, printers.table(found, context, is_wide=False))


def _refusal_section(deployment: ModelDeployment) -> str:
    refusals = deployment.status.refusals if deployment.status is not None else ()
    rows = [(r.node, r.reason, r.message) for r in refusals]
    return table_section("Nodes that cannot take a replica", ("NODE", "REASON", "MESSAGE"), rows)


async def _pool_lines(transport: Transport, node: Node) -> list[str]:
    """Return the pools of the node, its memory, and the wired limit that they ask for beside the effective one."""
    pools = [pool for pool in await _read_all(transport, NodePool) if in_pool(pool, node)]
    names = ", ".join(sorted(pool.name for pool in pools))
    lines = [f"Pools: {names or '<none>'}"]
    status = node.status
    if status is not None and status.allocatable_source is not None:
        total, models = map(quantity.show, (status.memory_bytes, status.allocatable_bytes))
        lines.append(f"Memory for models: {models} of {total} ({status.allocatable_source})")
    limit = None if status is None else status.wired_limit
    if limit is not None:
        asked = [
            f"{node_pool.spec.wired_limit} (pool {node_pool.name})"
            for node_pool in pools
            if node_pool.spec.wired_limit
        ]
        lines.append(
            f"Wired limit: effective {limit_text(limit)}; requested {', '.join(sorted(asked)) or '<none>'}"
        )
    return lines


async def _group_sections(transport: Transport, group: ShardGroup, now: datetime) -> list[str]:
    """Return the members of a group in rank order, missing ones included, and the replicas on them."""
    nodes = {node.name: node for node in await _read_all(transport, Node)}
    ready = await reader.ready_nodes(transport)
    named = [member.node for member in group.spec.members]
    if group.spec.selector is not None:
        named = sorted(n.name for n in nodes.values() if selects(group.spec.selector, n))
    addresses = {member.node: member.addresses for member in group.spec.members}
    rows = []
    for number, name in enumerate(named):
        status = nodes[name].status if name in nodes else None
        state = "Ready" if name in ready else "NotReady" if name in nodes else "not in the fleet"
        is_spare = group.spec.selector is None and number >= group.spec.wanted_size
        hardware = (
            ("-", "-") if status is None else (status.chip, quantity.show(status.allocatable_bytes))
        )
        own = ", ".join(map(str, addresses.get(name, ()))) or "as reported by its agent"
        rows.append((name, state, *hardware, "spare" if is_spare else "member", own))
    titles = ("NODE", "STATUS", "CHIP", "FOR MODELS", "ROLE", "ADDRESSES")
    on_it = frozenset(group.status.replicas if group.status is not None else ())
    replicas = await _replica_section(transport, lambda one: one.name in on_it)
    checks = () if group.status is None else group.status.fabric_checks
    return [
        table_section("Members", titles, rows),
        replicas,
        table_section("Checks of the cables", _CHECK_TITLES, _check_rows(checks, now)),
    ]


def _check_rows(checks: Sequence[FabricCheck], now: datetime) -> list[tuple[str, ...]]:
    """Return one row per check, the newest first."""
    return [
        (
            printers.age(check.at, now),
            terminal.paint(check.outcome, _CHECK_ROLES[check.outcome]),
            _speed(check.gb_per_second),
            _speed(check.usual_gb_per_second),
            ",".join(check.nodes),
            check.reason,
            check.message,
        )
        for check in reversed(checks)
    ]


def _speed(gb_per_second: float | None) -> str:
    return "-" if gb_per_second is None else f"{gb_per_second:g} GB/s"


async def _backend_section(transport: Transport, route: ModelRoute) -> str:
    """Return the backends of a route, and whether they are available."""
    deployments = {
        deployment.name: deployment for deployment in await _read_all(transport, ModelDeployment)
    }
    rows = [*_backend_rows("backends", route.spec.backends, deployments)]
    for number, rule in enumerate(route.spec.rules, 1):
        rows += _backend_rows(f"rule {number}", rule.backends, deployments)
    external = {endpoint.name: endpoint.url for endpoint in route.spec.external}
    for number, name in enumerate(route.spec.fallbacks, 1):
        state = _backend_state(name, external.get(name), deployments)
        rows.append((f"fallback {number}", name, "-", *state))
    backends = table_section("Backends", ("FROM", "BACKEND", "SHARE", "READY", "AVAILABLE"), rows)
    if not external:
        return backends
    titles = ("NAME", "URL", "MODEL", "KEY")
    outside = [
        (endpoint.name, endpoint.url, endpoint.model, endpoint.key or "-")
        for endpoint in route.spec.external
    ]
    return f"{backends}\n{table_section('External endpoints', titles, outside)}"


def _backend_rows(
    label: str, backends: Sequence[Backend], deployments: dict[str, ModelDeployment]
) -> list[tuple[str, ...]]:
    total = sum(backend.weight for backend in backends) or 1
    return [
        (
            label,
            backend.name,
            f"{backend.weight / total:.0%}",
            *_backend_state(backend.name, backend.external, deployments),
        )
        for backend in backends
    ]


def _backend_state(
    name: str, external: str | None, deployments: dict[str, ModelDeployment]
) -> tuple[str, str]:
    if external is not None:
        return "-", "external"
    deployment = deployments.get(name)
    if deployment is None:
        return "-", "no such deployment"
    if deployment.status is None:
        return "?", "Unknown"
    is_available = is_true(deployment.status.conditions, "Available")
    return str(deployment.status.ready_replicas), str(is_available)


def _source_sections(source: GitSource, now: datetime) -> list[str]:
    """Return the revisions, drift and inventory of a GitSource."""
    status = source.status
    if status is None:
        return ["Revisions: the repository has not been fetched yet"]
    since = status.applied_at
    applied = "never" if since is None else f"{printers.age(since, now)} ago"
    newest, stored = status.observed_commit or GitCommit(), status.applied_commit or GitCommit()
    rows = [
        ("Newest", status.observed_revision or "<none>", "", newest.author, newest.subject),
        ("Applied", status.applied_revision or "<none>", applied, stored.author, stored.subject),
    ]
    drift = [row for one in status.drift for row in _drift_rows(one)]
    inventory = [(entry.kind, entry.name) for entry in status.inventory]
    return [
        table_section("Revisions", ("", "COMMIT", "SINCE", "AUTHOR", "SUBJECT"), rows),
        table_section("Drift", ("OBJECT", "FIELD", "REPOSITORY", "FLEET", "CHANGED BY"), drift),
        table_section("Inventory", ("KIND", "NAME"), inventory),
    ]


def _drift_rows(one: Drift) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each field that differs; an older reconciler reports fields without their values."""
    name, managers = f"{one.kind.lower()}/{one.name}", ", ".join(one.managers) or "?"
    if not one.fields:
        return [(name, "<whole object>", "declared", "deleted", managers)]
    values = {field.path: (field.wanted, field.actual) for field in one.values}
    return [(name, path, *values.get(path, ("?", "?")), managers) for path in one.fields]


async def _fetch_section(transport: Transport, deployment: str) -> str:
    replicas = await _read_all(transport, Replica)
    return _fetch_table([replica for replica in replicas if replica.spec.deployment == deployment])


async def _file_section(transport: Transport, deployment: ModelDeployment) -> str:
    """Return what each node lacks of the deployment's hub model; empty for a folder. Raises StoreError."""
    item = await transport.get(keys.named(keys.SNAPSHOT_PREFIX, deployment.name))
    if deployment.spec.model.hub is None or item is None:
        return ""
    model_snapshot = codec.decode(ModelSnapshot, item)
    reports = [
        (node.name, report)
        for node in await _read_all(transport, Node)
        if node.status is not None
        for report in node.status.models
        if report.path == model_snapshot.folder and report.geometry is not None
    ]
    reports.sort(key=lambda pair: (pair[1].missing_bytes, pair[0]))
    rows = [
        (name, sizes.show(one.missing_bytes) if one.missing_bytes else "-", one.fetch_problem)
        for name, one in reports[:_NODES_SHOWN]
    ]
    title = f"Model files ({sizes.show(model_snapshot.size_bytes)})"
    if len(reports) > _NODES_SHOWN:
        title = f"{title}, the first {_NODES_SHOWN} of {len(reports)} nodes"
    return table_section(title, ("NODE", "MISSING", "PROBLEM"), rows)


def _fetch_table(replicas: Sequence[Replica]) -> str:
    """Return the fetches that run for the replicas; empty if there are none."""
    rows = [
        (
            replica.name,
            fetch.node,
            fetch.phase,
            f"{fetch.percent} %",
            f"{sizes.show(fetch.present_bytes)} of {sizes.show(fetch.total_bytes)}",
            f"{sizes.show(fetch.bytes_per_second)}/s",
            "-" if fetch.eta_seconds is None else duration.show(fetch.eta_seconds),
            fetch.source or "-",
            fetch.waiting,
        )
        for replica in replicas
        if replica.status is not None
        for fetch in replica.status.fetches
    ]
    titles = ("REPLICA", "NODE", "PHASE", "DONE", "BYTES", "RATE", "LEFT", "SOURCE", "")
    return table_section("Model fetches", titles, rows)


_HELP = """Show details of objects: problems with their cause, conditions, related objects, spec, owners of fields and events.

The spec has the fields that differ from their defaults; `fleetctl get -o yaml` prints all.

\b
  fleetctl describe md/qwen
  fleetctl describe node mac-1 mac-2
  fleetctl describe replicas -l team=a
  fleetctl describe -f qwen.yaml
  fleetctl describe request ID                 of an ended request; why its prompt was read again
"""


@click.command(help=_HELP, short_help="Show details of objects, their conditions and events.")
@click.argument("what", nargs=-1, metavar="[KIND [NAME...] | KIND/NAME...]")
@arguments.files_option
@arguments.recursive_option
@arguments.selector_option
@gateway_options
def describe(what: tuple[str, ...], **options: Any) -> None:
    """Show details of objects: spec, status, related objects and events."""
    first, slash, name = what[0].partition("/") if what else ("", "", "")
    if first.lower() in ("request", "requests") and (name or what[1:]):
        ids = (name, *what[1:]) if slash else what[1:]
        click.echo(run(describe_requests(ids, options)))
        return
    names = None if options["files"] else api_keys.parse_names(what)
    if names is not None:
        run(api_keys.describe(names, options))
        return
    run(_describe(_parse_selections(what, options), options))


def _parse_selections(what: tuple[str, ...], options: dict[str, Any]) -> list[Selection]:
    if options["files"]:
        if what or options["selector"]:
            raise click.UsageError("give names, or files with -f, but not both")
        found = targets.targets_in_files(options["files"], recursive=options["recursive"])
        return [targets.selection(target.kind, target.names) for target in found]
    is_all = len(what) == 1 and "/" not in what[0] and not options["selector"]
    return targets.parse_selections(
        what, options, verb="described", is_all=is_all, is_read=True, among=WITH_API_KEYS
    )


async def _describe(chosen: Sequence[Selection], options: dict[str, Any]) -> None:
    async with open_store(options) as transport:
        all_selected = await targets.read_all_selected(transport, chosen)
        for number, obj in enumerate(all_selected):
            click.echo(("\n\n" if number else "") + await _description(transport, obj))


async def _description(transport: Transport, obj: ApiObject) -> str:
    now = SystemClock().now()
    parts = [
        header(obj, now),
        await problem_section(transport, obj),
        condition_section(obj, now),
        *await kind_sections(transport, obj, now),
        yaml_section("Spec", clean_manifest(obj).get("spec")),
        owner_section(obj, now),
        await event_section(transport, obj, now),
    ]
    return "\n".join(part for part in parts if part)
