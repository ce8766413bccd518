"""The plan of an upgrade: what is installed and restarted, in which order, and whether a rollback is possible. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fleetctl.maintenance.mac_release import MacState
from fleetctl.maintenance.release import TargetRelease, changed_documents
from fleetctl.maintenance.rolling_run import PlanRefusal
from machinery.version import is_compatible

ORDER: Final = ("reconciler", "gateway", "nodeagent")
"""Servers before agents, as Kubernetes and k3s do. etcd is no part of a release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One Mac, as the store and the Mac itself report it."""

    name: str
    is_ready: bool
    mac: MacState
    mlx_lm: str = ""
    deployments: tuple[str, ...] = ()
    """The deployments with replicas on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """The Macs to upgrade, and the versions of all parts of the fleet."""

    nodes: Sequence[NodeFacts]
    versions: Mapping[str, str] = field(default_factory=dict)
    """By the name of a part, such as `nodeagent mac-3`: of all parts, also those that are not upgraded."""
    etcd: str = ""
    gateways: int = 0
    """The number of gateways that are registered."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The restart of one service, after the Mac's link points to the release."""

    node: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradePlan:
    """An upgrade, step by step."""

    release: TargetRelease
    installs: tuple[str, ...]
    """The nodes that get the archive."""
    restarts: tuple[Restart, ...]
    previous: Mapping[str, str]
    """By node: the release to go back to; "" if it is unknown."""
    unchanged: tuple[str, ...] = ()
    """The nodes that run the release already."""
    stored_changes: tuple[str, ...] | None = None
    """Documents whose stored version changes; None if it is unknown."""
    notes: tuple[str, ...] = ()

    @property
    def has_rollback(self) -> bool:
        """True if a Mac that does not become Ready goes back by itself."""
        return self.stored_changes == ()


def plan_upgrade(facts: FleetFacts, release: TargetRelease) -> UpgradePlan | PlanRefusal:
    """Return the smallest set of steps after which the Macs run the release."""
    version = release.version
    refusal = _skew(facts, version) or next(
        filter(None, (_refusal_of_node(node, release) for node in facts.nodes)), None
    )
    if refusal is not None:
        return refusal
    nodes = sorted(facts.nodes, key=lambda node: node.name)
    restarts = [
        Restart(node.name, part)
        for part in ORDER
        for node in nodes
        if part in node.mac.parts and not (node.mac.runs(part, version) and node.is_ready)
    ]
    busy = {restart.node for restart in restarts} | {
        n.name for n in nodes if n.mac.current != version
    }
    stored = _stored_changes([node for node in nodes if node.name in busy], release)
    return UpgradePlan(
        release=release,
        installs=tuple(node.name for node in nodes if version not in node.mac.installed),
        restarts=tuple(restarts),
        previous={node.name: previous_release(node.mac, version) for node in nodes},
        unchanged=tuple(node.name for node in nodes if node.name not in busy),
        stored_changes=stored,
        notes=tuple(_notes(facts, restarts, release)),
    )


def previous_release(mac: MacState, version: str) -> str:
    """Return the release that a Mac runs or ran before `version`; "" if it is unknown.

    After a run that was killed, the link may point to the new release already.
    """
    running = [part.version for part in mac.parts.values() if part.version not in ("", version)]
    if running or mac.current != version:
        return (*running, mac.current)[0]
    others = [one for one in mac.installed if one != version]
    return others[0] if len(others) == 1 else ""


def _skew(facts: FleetFacts, version: str) -> PlanRefusal | None:
    far = [
        f"{name} is {other}"
        for name, other in sorted(facts.versions.items())
        if not is_compatible(version, other)
    ]
    if not far:
        return None
    return PlanRefusal(
        f"{version} is more than one minor version away: {', '.join(far[:5])}. Upgrade one minor version at a time"
    )


def _refusal_of_node(node: NodeFacts, release: TargetRelease) -> PlanRefusal | None:
    mac, version = node.mac, release.version
    if version not in mac.installed and release.archive is None:
        return PlanRefusal(
            f"node/{node.name} has no release {version}: it has {', '.join(mac.installed)}. Give its archive with --to"
        )
    if "nodeagent" not in mac.parts:
        return PlanRefusal(
            f"node/{node.name}: its agent is no service, so nothing can restart it. Install it with `fleetctl service "
            "install nodeagent`, or upgrade this Mac by hand (docs/install.md#upgrade)"
        )
    has_begun = mac.current == version or any(mac.runs(part, version) for part in mac.parts)
    if not (node.is_ready or has_begun):
        return PlanRefusal(
            f"node/{node.name} is not Ready, so its upgrade could not be judged: `fleetctl describe node {node.name}` says "
            "why. Mend it, or upgrade the other nodes by name"
        )
    return None


def _stored_changes(nodes: Sequence[NodeFacts], release: TargetRelease) -> tuple[str, ...] | None:
    """Return the documents that are stored in another shape than by one of the Macs; None if it is unknown."""
    stored_changes: dict[str, None] = {}
    for node in nodes:
        changed = changed_documents(node.mac.stored, release.stored)
        if changed is None:
            return None
        stored_changes |= dict.fromkeys(changed)
    return tuple(stored_changes)


def _notes(facts: FleetFacts, restarts: Sequence[Restart], release: TargetRelease) -> list[str]:
    notes = []
    if facts.etcd:
        notes.append(
            f"etcd stays at {facts.etcd}: a release brings none; upgrade it before, one member and one minor version at a time"
        )
    upgraded = sum(restart.part == "gateway" for restart in restarts)
    if upgraded and facts.gateways < 2:
        notes.append(
            "the only gateway restarts: clients are refused for some seconds. Start a second one first"
        )
    if release.mlx_lm:
        affected = sorted(
            {
                name
                for node in facts.nodes
                if node.mlx_lm not in ("", release.mlx_lm)
                for name in node.deployments
            }
        )
        if affected:
            notes.append(
                f"mlx-lm changes to {release.mlx_lm}; engines keep the old one until they start again. After the upgrade, "
                "one deployment after the other: "
                + "; ".join(f"fleetctl rollout restart md/{name}" for name in affected)
            )
    return notes


def plan_lines(plan: UpgradePlan) -> list[str]:
    """Return the plan for people."""
    version = plan.release.version
    lines = [f"Upgrade to {version}, one Mac at a time; engines keep running."]
    if plan.installs:
        lines.append(f"  install beside the release in use: {', '.join(plan.installs)}")
    for number, restart in enumerate(plan.restarts, 1):
        old = plan.previous[restart.node] or "unknown"
        lines.append(f"  {number}. {restart.part} of {restart.node}: {old} -> {version}")
    if plan.unchanged:
        lines.append(f"  {version} runs already on: {', '.join(plan.unchanged)}")
    lines += [f"  note: {note}" for note in plan.notes]
    if plan.has_rollback:
        lines.append(
            "A Mac that does not become Ready goes back to its release, and the upgrade stops there."
        )
    elif plan.stored_changes is None:
        lines.append(
            "No rollback: it is unknown whether documents are stored in another shape. The upgrade stops at the first Mac "
            "that does not become Ready."
        )
    else:
        lines.append(
            f"No rollback: documents are stored in another shape ({', '.join(plan.stored_changes)}), which the earlier "
            "release refuses. Make a backup first (`fleetctl backup`). The upgrade stops at the first Mac that does not "
            "become Ready."
        )
    return lines
