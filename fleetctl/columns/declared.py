"""Columns of what people declare: deployments, pools, groups, routes, sources; and of API keys. Pure."""

from collections.abc import Sequence

from fleetctl import documents
from fleetctl.columns.cells import (
    AGE,
    NAME,
    Cell,
    Column,
    Columns,
    Moment,
    age,
    at,
    condition,
    reason,
    text,
    texts,
)
from fleetctl.documents import Tree

_COMMIT_SHOWN = 12


def _ready(deployment: Tree, _: Moment) -> str:
    status = deployment.get("status")
    wanted = at(deployment, "spec", "replicas")
    if at(deployment, "spec", "autoscaling") is not None and status is not None:
        wanted = status.get("desiredReplicas", 0)
    return f"{at(status, 'readyReplicas') or 0}/{1 if wanted is None else wanted}"


def _served_names(deployment: Tree, _: Moment) -> str:
    names = (documents.name_of(deployment), *(at(deployment, "spec", "servedNames") or ()))
    return ",".join(dict.fromkeys(names))


def _size(group: Tree, _: Moment) -> str:
    return str(at(group, "spec", "size") or len(at(group, "spec", "members") or ()))


def _members(group: Tree, _: Moment) -> str:
    """Return who is listed in a group; of a selector how many it finds."""
    members = at(group, "spec", "members")
    if members:
        return ",".join(member["node"] for member in members)
    status = group.get("status")
    return "?" if status is None else f"{status.get('members', 0)} selected"


def _replicas(group: Tree, _: Moment) -> str:
    """Return what runs on a group."""
    status = group.get("status")
    return "?" if status is None else ",".join(status.get("replicas") or ()) or "-"


def _nodes(pool: Tree, _: Moment) -> str:
    status = pool.get("status")
    return "?" if status is None else str(status.get("nodes", 0))


def _shares(backends: Sequence[Tree]) -> str:
    return ",".join(f"{one['deployment']}={one.get('weight', 1)}" for one in backends)


def _rule(rule: Tree) -> str:
    """Return which headers lead where: `x-team=research,x-beta -> qwen=1`."""
    headers = (
        h["name"] if h.get("value") is None else f"{h['name']}={h['value']}"
        for h in rule["headers"]
    )
    return f"{','.join(headers)} -> {_shares(rule['backends'])}"


def _backends(route: Tree, _: Moment) -> str:
    return _shares(at(route, "spec", "backends") or ())


def _rules(route: Tree, _: Moment) -> str:
    return "; ".join(_rule(rule) for rule in at(route, "spec", "rules") or ())


def _revision(source: Tree, _: Moment) -> str:
    """Return `main@0123456789ab`: as much of a commit as tells it from others."""
    branch, at_sign, commit = (at(source, "status", "appliedRevision") or "").rpartition("@")
    return f"{branch}{at_sign}{commit[:_COMMIT_SHOWN]}"


def _limit(field: str) -> Cell:
    return lambda key, _: str(at(key, "spec", field) or "-")


def _models(key: Tree, _: Moment) -> str:
    return ",".join(at(key, "spec", "models") or ()) or "<all>"


def _ends(key: Tree, moment: Moment) -> str:
    expires = documents.time_of(at(key, "spec", "expires"))
    if expires is None:
        return "never"
    # As an age, but of what is still to come.
    return "expired" if expires <= moment.now else f"in {age(moment.now, expires)}"


COLUMNS: dict[str, Columns] = {
    "ModelDeployment": (
        NAME,
        Column("READY", _ready),
        Column("AVAILABLE", condition("Available")),
        AGE,
        Column("MODEL", text("spec", "model", "path"), is_wide=True),
        Column("SERVED NAMES", _served_names, is_wide=True),
        Column("WHY", reason("Available"), is_wide=True),
    ),
    "NodePool": (
        NAME,
        Column("READY", condition("Ready")),
        Column("NODES", _nodes),
        AGE,
    ),
    "ShardGroup": (
        NAME,
        Column("READY", condition("Ready")),
        Column("SIZE", _size),
        Column("MEMBERS", _members),
        Column("BACKEND", text("spec", "backend")),
        Column("REPLICAS", _replicas),
        AGE,
        Column("PARALLELISM", text("spec", "parallelism"), is_wide=True),
        Column("RESERVATION", text("spec", "reservation"), is_wide=True),
        Column("WHY", reason("Ready"), is_wide=True),
    ),
    "ModelRoute": (
        NAME,
        Column("MODEL", text("spec", "model")),
        Column("ACCEPTED", condition("Accepted")),
        Column("BACKENDS", _backends),
        Column("FALLBACKS", texts("spec", "fallbacks")),
        AGE,
        Column("RULES", _rules, is_wide=True),
        Column("WHY", reason("Accepted"), is_wide=True),
    ),
    "GitSource": (
        NAME,
        Column("READY", condition("Ready")),
        Column("REVISION", _revision, wide_cell=text("status", "appliedRevision")),
        AGE,
        Column("REPOSITORY", text("spec", "repository"), is_wide=True),
        Column("PATH", text("spec", "path"), is_wide=True),
        Column("WHY", reason("Ready"), is_wide=True),
    ),
    "ApiKey": (
        NAME,
        Column("MODELS", _models),
        Column("REQUESTS/MIN", _limit("requestsPerMinute")),
        Column("TOKENS/MIN", _limit("tokensPerMinute")),
        Column("AT ONCE", _limit("concurrency")),
        Column("ADMIN", lambda key, _: "yes" if at(key, "spec", "isAdmin") else ""),
        AGE,
        Column("EXPIRES", _ends, is_timeless=False),
    ),
}
