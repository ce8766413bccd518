"""Root causes: what a person mends, and what it explains."""

from collections.abc import Sequence

import pytest

from insight.fleet_caches import FleetCaches, caches_of
from insight.fleet_views import rows, sentence, summary
from insight.root_cause import Problem, find_problems
from schemas.deployment import NodeRefusal
from schemas.meta import ConditionStatus
from schemas.reasons import SECTIONS
from schemas.records import GatewayLease
from store import codec, keys
from store.port import KeyValue, Put
from tests.support.broken_objects import (
    LEADER,
    condition,
    put_asleep,
    put_away,
    put_deployment,
    put_replica,
)
from tests.support.dashboards import CLOCK
from tests.support.macs import mac


def fleet(*puts: Sequence[Put]) -> FleetCaches:
    items = [KeyValue(put.key, put.value, 1, 1) for puts_ in (*puts, [LEADER]) for put in puts_]
    return caches_of(items, CLOCK)


def titles(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    return [(problem.tone, problem.title) for problem in problems]


def test_a_deployment_has_the_reason_of_its_replica_with_the_names_in_its_command() -> None:
    caches = fleet(
        mac("mac-1"),
        put_deployment(
            "tiny",
            condition(
                "Available", "ReplicaNotReady", "0 of 2 replicas ready; tiny-0 on mac-1: no room"
            ),
            condition("Progressing", "Stalled", "no progress for 10m"),
            desired=2,
        ),
        put_replica("tiny", 0, "mac-1", condition("Ready", "ModelUnusable", "no room")),
        put_replica("tiny", 1, "mac-1", condition("Ready", "ModelUnusable", "no room")),
    )
    (problem,) = find_problems(caches)
    assert titles([problem]) == [("bad", "tiny does not answer: its engine cannot load the model")]
    assert problem.cause == "tiny-0 on mac-1: no room (1 more replica does the same)"
    assert problem.command == "fleetctl logs tiny-0"
    assert problem.affected == ("Replica/tiny-0", "Replica/tiny-1")
    assert len(problem.conditions) == 4
    assert problem.concerns("Replica", "tiny-1")
    assert not problem.concerns("Node", "mac-1")


def test_a_mac_that_sleeps_is_neither_offline_nor_a_problem() -> None:
    caches = fleet(mac("mac-1"), put_asleep("mac-2"))
    states = {row["name"]: (row["state"], row["reason"]) for row in rows(caches, "macs")}
    assert states == {"mac-1": ("online", ""), "mac-2": ("asleep", "a request wakes it")}
    assert str(summary(caches)["sentence"]).startswith("1 of 2 Macs online, 1 asleep.")
    assert find_problems(caches) == []


def test_a_mac_that_is_away_is_the_cause_of_what_ran_there() -> None:
    caches = fleet(
        put_away("mac-1"),
        put_away("mac-2"),
        put_deployment("qwen", condition("Available", "ReplicaNotReady", "0 of 1 replicas ready")),
        put_replica("qwen", 0, "mac-2", condition("Ready", "AgentAway", "its agent is away")),
        put_deployment(
            "long",
            condition("Available", "Unschedulable"),
            condition("Placed", "Unschedulable"),
            refusals=[NodeRefusal(node="mac-1", reason="NodeNotReady", message="")],
        ),
    )
    (problem,) = find_problems(caches)
    assert titles([problem]) == [("bad", "2 Macs: off, asleep or cut off")]
    assert (problem.kind, problem.name) == ("Node", "mac-1")
    assert problem.cause == "its agent does not renew its lease; long, qwen do not answer"
    assert set(problem.affected) == {
        "Node/mac-2",
        "ModelDeployment/qwen",
        "ModelDeployment/long",
        "Replica/qwen-0",
    }


def test_refusals_of_macs_name_the_reason_of_most() -> None:
    refusals = [
        NodeRefusal(node="mac-0", reason="NodeCordoned", message="it is cordoned"),
        NodeRefusal(node="mac-1", reason="NodeCordoned", message="it is cordoned"),
        NodeRefusal(node="mac-4", reason="NodeCordoned", message="it is cordoned"),
        NodeRefusal(node="mac-2", reason="ModelNotFound", message="~/models/x does not exist"),
        NodeRefusal(node="mac-3", reason="ModelNotFound", message="~/models/x does not exist"),
    ]
    caches = fleet(put_deployment("x", condition("Placed", "Unschedulable"), refusals=refusals))
    (problem,) = find_problems(caches)
    assert problem.title == "x does not answer: its folder is not on the Macs"
    assert problem.cause == "mac-2: ~/models/x does not exist (1 more Mac says the same)"


def test_macs_that_are_not_selected_do_not_hide_why_the_others_refuse() -> None:
    refusals = [
        NodeRefusal(node="mac-0", reason="SelectorMismatch", message="it lacks the label rack=1"),
        NodeRefusal(node="mac-1", reason="SelectorMismatch", message="it lacks the label rack=1"),
        NodeRefusal(node="mac-2", reason="InsufficientMemory", message="needs 5.0 GiB"),
    ]
    caches = fleet(put_deployment("x", condition("Placed", "Unschedulable"), refusals=refusals))
    (problem,) = find_problems(caches)
    assert problem.title == "x does not answer: no Mac has enough memory"
    assert problem.cause == "mac-2: needs 5.0 GiB"


def test_choices_of_people_are_warnings_and_normal_states_are_none() -> None:
    paused = condition("Progressing", "Paused", status=ConditionStatus.UNKNOWN)
    caches = fleet(
        mac("mac-1", condition("ApiServing", "PortTaken", "port 4001 is taken")),
        mac("mac-2", condition("ApiServing", "PortTaken", "port 4002 is taken")),
        put_deployment("qwen", paused, ready=1),
        put_deployment("new", condition("Available", "ReplicasStarting")),
        put_replica("new", 0, "mac-1", condition("Ready", "WaitingForAgent")),
    )
    assert titles(find_problems(caches)) == [
        ("warning", "qwen: its rollout is paused"),
        ("warning", "2 Macs: the agent's API cannot listen"),
    ]


def test_a_fleet_without_a_leader_says_so() -> None:
    caches = caches_of([KeyValue(put.key, put.value, 1, 1) for put in put_deployment("x")], CLOCK)
    (problem,) = find_problems(caches)
    assert problem.title.startswith("No reconciler leads")
    assert str(summary(caches)["sentence"]).endswith("No reconciler leads.")


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([], "Nothing is deployed."),
        ([("a", 0, 0, "")], "All models are scaled to zero."),
        ([("a", 1, 1, "")], "The model answers."),
        ([("a", 1, 0, "R")], "a does not answer."),
        ([("a", 1, 1, ""), ("b", 2, 2, "")], "All 2 models answer."),
        ([("a", 1, 0, "R: m"), ("b", 1, 1, "")], "1 of 2 models does not answer: a."),
        ([("a", 1, 0, ""), ("b", 2, 1, "R: m")], "1 of 2 models is starting: a."),
        ([("a", 2, 1, "R: m"), ("b", 2, 1, "")], "2 of 2 models lack replicas: a, b."),
        (
            [(name, 1, 0, "R") for name in "abcdefg"],
            "7 of 7 models do not answer: a, b, c and 4 more.",
        ),
    ],
)
def test_the_headline_names_the_worst(models: list[tuple[str, int, int, str]], words: str) -> None:
    macs = rows(fleet(mac("mac-1"), put_away("mac-2")), "macs")
    found = [dict(zip(("name", "desired", "ready", "reason"), one, strict=True)) for one in models]
    assert sentence(fleet(put_gateways("g")), macs, found, ()) == f"1 of 2 Macs online. {words}"


def put_gateways(*names: str) -> list[Put]:
    value = codec.encode(GatewayLease(url="http://127.0.0.1:9", version="1"))
    return [Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, name), value=value) for name in names]


@pytest.mark.parametrize(
    ("names", "silent", "ready", "words"),
    [
        ("", "", 1, "No gateway runs."),
        ("g", "g", 1, "No gateway answers."),
        ("gh", "hg", 1, "No gateway answers."),
        ("gh", "h", 1, "The model answers. 1 of 2 gateways does not answer: h."),
        ("ghi", "ih", 1, "The model answers. 2 of 3 gateways do not answer: h, i."),
        ("g", "g", 0, "a is starting. No gateway answers."),
    ],
)
def test_the_headline_tells_of_gateways(names: str, silent: str, ready: int, words: str) -> None:
    caches = fleet(mac("mac-1"), put_gateways(*names))
    models = [{"name": "a", "desired": 1, "ready": ready, "reason": ""}]
    headline = sentence(caches, rows(caches, "macs"), models, silent)
    assert headline == f"1 of 1 Macs online. {words}"
    empty = sentence(caches, rows(caches, "macs"), [], silent)
    assert empty == "1 of 1 Macs online. Nothing is deployed."


def test_titles_have_twelve_words_at_most() -> None:
    long = [
        row.name
        for section in SECTIONS
        for row in section.reasons
        if len(f"qwen does not answer: {row.title}".split()) > 12
    ]
    assert long == []
