"""The plan of a restart: shard groups, etcd's majority, replicas, FileVault; and the output of macOS' programs."""

from dataclasses import replace

import pytest

from fleetctl.maintenance.reboot_plan import (
    EtcdMember,
    GroupMate,
    RebootFacts,
    RebootPlan,
    RebootWishes,
    hosts_of_urls,
    parse_file_vault,
    plan_reboot,
)
from fleetctl.maintenance.rolling_run import PlanRefusal

FACTS = RebootFacts(node="mac-1", hosts=frozenset({"mac-1", "10.0.0.1"}), file_vault="Off")
MATE = GroupMate(group="pair", node="mac-2", is_ready=True, is_draining=False)


def members(*healthy: bool) -> tuple[EtcdMember, ...]:
    """Return members on mac-1, mac-2 and so on."""
    return tuple(
        EtcdMember(name=f"e{n}", hosts=frozenset({f"10.0.0.{n}"}), is_healthy=is_healthy)
        for n, is_healthy in enumerate(healthy, 1)
    )


@pytest.mark.parametrize(
    ("facts", "refusal"),
    [
        (replace(FACTS, mates=[replace(MATE, is_draining=True)]), "members of shardgroup/pair, and mac-2 is draining"),
        (replace(FACTS, mates=[replace(MATE, is_ready=False)]), "mac-2 is not Ready: restart one Mac of a group at a time"),
        (replace(FACTS, members=members(True)), "runs the only member of etcd"),
        (replace(FACTS, members=members(True, True)), "only 1 others are healthy; 2 are needed for its majority"),
        (replace(FACTS, members=members(True, True, False)), "runs 1 of 3 members of etcd, and only 1 others are healthy"),
        (replace(FACTS, replicas=["qwen-0"]), "has 1 replicas (qwen-0), which would be killed: add --drain"),
        (replace(FACTS, file_vault="On"), "FileVault is on, so nothing of the fleet runs after a restart"),
    ],
)  # fmt: skip
def test_refusals(facts: RebootFacts, refusal: str) -> None:
    reboot = plan_reboot(facts, RebootWishes())
    assert isinstance(reboot, PlanRefusal)
    assert refusal in reboot.message


def planned(facts: RebootFacts, wishes: RebootWishes | None = None) -> RebootPlan:
    reboot = plan_reboot(facts, wishes or RebootWishes())
    assert isinstance(reboot, RebootPlan), reboot
    return reboot


def test_a_mac_with_one_of_three_healthy_members_restarts() -> None:
    assert not planned(
        replace(FACTS, mates=[MATE], members=members(True, True, True))
    ).asks_password
    elsewhere = replace(FACTS, hosts=frozenset({"mac-9"}), members=members(True))
    assert planned(elsewhere).lines[-1].startswith("  then its lease must come back")


def test_file_vault_s_password_is_asked_only_of_a_person() -> None:
    locked = replace(FACTS, file_vault="On", can_unlock=True)
    assert planned(locked).asks_password
    plan = planned(locked, RebootWishes(leaves_locked=True))
    assert not plan.asks_password
    assert "waits for its password" in plan.lines[1]
    drained = planned(replace(FACTS, replicas=["qwen-0"]), RebootWishes(drain=True))
    assert drained.lines[1] == "  1 replicas are moved away first"


@pytest.mark.parametrize(
    ("code", "text", "state"),
    [
        (0, "FileVault is On.\n", "On"),
        (0, "FileVault is Off.\nDeferred enablement appears to be active for user 'a'.\n", "Off"),
        (127, "", "Off"),
        (1, "Error: not authorized\n", "Unknown"),
    ],
)
def test_the_state_of_file_vault(code: int, text: str, state: str) -> None:
    assert parse_file_vault(code, text) == state


def test_hosts_of_members() -> None:
    urls = ("https://10.0.0.1:2379", "http://[fd00::1]:2380", "https://Mac-1.local:2379")
    assert hosts_of_urls(urls) == {"10.0.0.1", "fd00::1", "mac-1.local"}
