"""The plan of a restart: the refusals, and what the person is told before. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from fleetctl.maintenance.rolling_run import PlanRefusal
from nodeagent.hardware.macos_settings import parse_filevault

FileVault: TypeAlias = Literal["Off", "On", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMate:
    """Another Mac of the same shard group."""

    group: str
    node: str
    is_ready: bool
    is_draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMember:
    """One member of etcd."""

    name: str
    hosts: frozenset[str]
    """The hosts in its URLs."""
    is_healthy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootFacts:
    """A Mac, and what depends on it."""

    node: str
    hosts: frozenset[str]
    """Its addresses and names."""
    mates: Sequence[GroupMate] = ()
    members: Sequence[EtcdMember] = ()
    replicas: Sequence[str] = ()
    """The replicas with a rank on it."""
    file_vault: FileVault = "Unknown"
    can_unlock: bool = False
    """True if a person at the terminal may give the password of FileVault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootWishes:
    """The flags of the command."""

    drain: bool = False
    leaves_locked: bool = False
    """--leave-locked: restart although the disk stays locked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootPlan:
    """The restart of a Mac."""

    lines: tuple[str, ...]
    """The plan for people."""
    asks_password: bool = field(default=False)
    """True if the person gives the password of FileVault (`fdesetup authrestart`)."""


def plan_reboot(facts: RebootFacts, wishes: RebootWishes) -> RebootPlan | PlanRefusal:
    """Return what will happen, or why not."""
    refusal = _refusal_of_group(facts) or _refusal_of_etcd(facts)
    if refusal is None and facts.replicas and not wishes.drain:
        refusal = PlanRefusal(
            f"node/{facts.node} has {len(facts.replicas)} replicas ({', '.join(sorted(facts.replicas)[:5])}), which would be "
            "killed: add --drain to move them away first"
        )
    if refusal is not None:
        return refusal
    asks = facts.file_vault == "On" and facts.can_unlock and not wishes.leaves_locked
    if facts.file_vault == "On" and not (asks or wishes.leaves_locked):
        return PlanRefusal(
            f"node/{facts.node}: FileVault is on, so nothing of the fleet runs after a restart until a person unlocks the "
            "disk. Run this in a terminal, which asks for the password of a FileVault user (fdesetup authrestart, good for "
            "one restart), or add --leave-locked if somebody unlocks it there, or from macOS 26 on with `fleetctl node "
            f"unlock {facts.node}`"
        )
    return RebootPlan(lines=tuple(_lines(facts, asks=asks)), asks_password=asks)


def _lines(facts: RebootFacts, *, asks: bool) -> list[str]:
    lines = [f"node/{facts.node} restarts:"]
    if facts.replicas:
        lines.append(f"  {len(facts.replicas)} replicas are moved away first")
    if asks:
        lines.append("  FileVault is on: its password is asked here, and unlocks the disk once")
    elif facts.file_vault == "On":
        lines.append(
            "  FileVault is on: the Mac waits for its password after the restart (at its keyboard, or from macOS 26 on by "
            f"`fleetctl node unlock {facts.node}`), and nothing of the fleet runs until then"
        )
    elif facts.file_vault == "Unknown":
        lines.append("  whether FileVault is on is unknown")
    lines.append("  then its lease must come back, and placement is enabled again")
    return lines


def _refusal_of_group(facts: RebootFacts) -> PlanRefusal | None:
    for mate in facts.mates:
        if mate.is_draining or not mate.is_ready:
            state = "draining" if mate.is_draining else "not Ready"
            return PlanRefusal(
                f"node/{facts.node} and node/{mate.node} are members of shardgroup/{mate.group}, and {mate.node} is {state}: "
                "restart one Mac of a group at a time"
            )
    return None


def _refusal_of_etcd(facts: RebootFacts) -> PlanRefusal | None:
    own = [member for member in facts.members if member.hosts & facts.hosts]
    if not own:
        return None
    left = sum(member.is_healthy for member in facts.members if member not in own)
    needed = len(facts.members) // 2 + 1
    if left >= needed:
        return None
    if len(facts.members) == 1:
        return PlanRefusal(
            f"node/{facts.node} runs the only member of etcd: without it nothing can be moved, and this command could not see "
            "the Mac come back. Restart it by hand: `sudo shutdown -r now`; engines and gateways on other Macs go on meanwhile"
        )
    return PlanRefusal(
        f"node/{facts.node} runs {len(own)} of {len(facts.members)} members of etcd, and only {left} others are healthy; "
        f"{needed} are needed for its majority. Mend the others first (`fleetctl doctor`)"
    )


def parse_file_vault(code: int, text: str) -> FileVault:
    """Return what `fdesetup status` says; Off where there is no such program (exit code 127)."""
    if code == 127:
        return "Off"
    state = parse_filevault(text)
    return "Unknown" if state is None else ("On" if state else "Off")


def hosts_of_urls(urls: Sequence[str]) -> frozenset[str]:
    """Return the hosts of URLs."""
    found = (urlsplit(url).hostname for url in urls)
    return frozenset(host.lower() for host in found if host)
