"""The report of a simulation: the first state, what a step changed and why, and which Mac may be lost."""

from dataclasses import replace

from fleetctl.simulate import report
from fleetctl.simulate.report import LossOutcome, SimulationStep
from fleetctl.simulate.simulated_fleet import (
    FleetSnapshot,
    MissingReplicas,
    NodeUsage,
    ReplicaPlace,
    natural_key,
)

GIB = 2**30


def mac(name: str, *, reserved_gib: int = 0, is_ready: bool = True) -> NodeUsage:
    return NodeUsage(
        name=name,
        chip="Apple M4 Max",
        offered_bytes=64 * GIB,
        reserved_bytes=reserved_gib * GIB,
        is_ready=is_ready,
    )


def place(replica: str, node: str, *, uid: str = "", is_serving: bool = True) -> ReplicaPlace:
    return ReplicaPlace(
        deployment=replica.rpartition("-")[0],
        replica=replica,
        uid=uid or f"{replica}-on-{node}",
        node=node,
        memory_bytes=16 * GIB,
        is_serving=is_serving,
    )


def missing(deployment: str) -> MissingReplicas:
    return MissingReplicas(deployment=deployment, missing=1, wanted=2, why="0/3 nodes fit: 3 full")


BEFORE = FleetSnapshot(
    at_s=60.0,
    nodes=(mac("mac-1", reserved_gib=8), mac("mac-2"), mac("mac-10")),
    places=(place("llama-0", "mac-1"), place("phi-0", "mac-1"), place("phi-1", "mac-2")),
    causes={},
    missing=(),
    wanted=3,
    is_quiet=True,
)


def step(state: FleetSnapshot, event: str = "power loss of mac-1") -> SimulationStep:
    return SimulationStep(event=event, took_s=43.0, state=state, before=BEFORE)


def test_the_first_step_shows_every_mac() -> None:
    first = SimulationStep(event="apply", took_s=17.0, state=BEFORE)
    assert (
        report.step_text(first)
        == """\
apply: 3 of 3 replicas answer after 17s

mac-1  Apple M4 Max, 64.0 GiB for models
  llama-0     16.0 GiB   25%  ██████████
  phi-0       16.0 GiB   25%  ██████████
  reserved     8.0 GiB   12%  ▒▒▒▒▒  (by pools)
  free        24.0 GiB   38%  ···············

mac-2  Apple M4 Max, 64.0 GiB for models
  phi-1       16.0 GiB   25%  ██████████
  free        48.0 GiB   75%  ······························

mac-10  Apple M4 Max, 64.0 GiB for models
  free        64.0 GiB  100%  ········································
"""
    )


LOST = replace(
    BEFORE,
    nodes=(mac("mac-1", is_ready=False), mac("mac-2"), mac("mac-10")),
    places=(
        place("llama-0", "mac-2"),
        place("phi-0", "mac-1", is_serving=False),
        place("phi-1", "mac-10", uid="new"),
    ),
    causes={"phi-1-on-mac-2": "Preempted: llama has priority 10, phi-1 has 0"},
    missing=(missing("phi"),),
)


def test_a_later_step_shows_what_it_changed_and_why() -> None:
    assert (
        report.step_text(step(LOST))
        == """\
power loss of mac-1: 2 of 3 replicas answer after 43s

llama-0 moves from mac-1 to mac-2 (mac-1 is lost)
phi-1 moves from mac-2 to mac-10 (displaced by llama-0: llama has priority 10, phi-1 has 0)
phi-0 is lost with mac-1, and no other node can take it

mac-1  Apple M4 Max, not reachable
- llama-0    16.0 GiB   25%  ░░░░░░░░░░
  phi-0      16.0 GiB   25%  ██████████  (does not answer)

mac-2  Apple M4 Max, 64.0 GiB for models
+ llama-0    16.0 GiB   25%  ██████████
- phi-1      16.0 GiB   25%  ░░░░░░░░░░
  free       48.0 GiB   75%  ······························

mac-10  Apple M4 Max, 64.0 GiB for models
+ phi-1      16.0 GiB   25%  ██████████
  free       48.0 GiB   75%  ······························

0 other Macs unchanged.

phi: 1 of 2 replicas missing: 0/3 nodes fit: 3 full
"""
    )


def test_a_step_without_moves_says_so() -> None:
    joined = replace(BEFORE, nodes=(*BEFORE.nodes, mac("mac-11")))
    text = report.step_text(step(joined, "mac-11 joins"))
    assert "\n\nNothing moved.\n\nmac-11  Apple M4 Max, 64.0 GiB for models\n" in text
    assert text.endswith("\n\n3 other Macs unchanged.\n")


def test_the_tree_has_causes_and_nodes() -> None:
    tree = report.step_tree(step(LOST))
    assert tree["moves"] == [
        {
            "deployment": "llama",
            "from": {"replica": "llama-0", "node": "mac-1"},
            "to": {"replica": "llama-0", "node": "mac-2"},
            "because": "mac-1 is lost",
        },
        {
            "deployment": "phi",
            "from": {"replica": "phi-1", "node": "mac-2"},
            "to": {"replica": "phi-1", "node": "mac-10"},
            "because": "displaced by llama-0: llama has priority 10, phi-1 has 0",
        },
    ]
    first = report.step_tree(SimulationStep(event="apply", took_s=0.0, state=BEFORE))["nodes"]
    assert isinstance(first, list)
    assert first[0] == {
        "node": "mac-1",
        "chip": "Apple M4 Max",
        "isReady": True,
        "memoryBytes": 64 * GIB,
        "reservedBytes": 8 * GIB,
        "usedBytes": 32 * GIB,
        "freeBytes": 24 * GIB,
    }


def test_which_single_mac_may_be_lost() -> None:
    bad = LossOutcome(node="mac-1", step=step(LOST))
    fine = LossOutcome(node="mac-10", step=replace(step(BEFORE), took_s=0.0))
    only = replace(LOST, missing=(), places=(place("llama-0", "mac-2"),))
    slow = LossOutcome(node="mac-2", step=replace(step(only), before=only))
    assert (
        report.losses_text([bad, slow, fine])
        == """\
Which single Mac may I lose? 2 of 3

MAC      MAY BE LOST   NOT PLACED WITHOUT IT   INTERRUPTED   TOOK
mac-1    no            1 of 2 phi              llama         43s
mac-2    yes           -                       llama         43s
mac-10   yes           -                       -             -

mac-1: phi: 1 of 2 replicas missing: 0/3 nodes fit: 3 full
"""
    )
    assert report.loss_tree(bad) == {
        "node": "mac-1",
        "mayBeLost": False,
        "notPlaced": [
            {"deployment": "phi", "missing": 1, "wanted": 2, "why": "0/3 nodes fit: 3 full"}
        ],
        "interrupted": ["llama"],
        "tookSeconds": 43.0,
    }


def test_what_was_missing_before_a_loss_does_not_count() -> None:
    short = replace(BEFORE, missing=(missing("phi"),))
    loss = LossOutcome(node="mac-1", step=replace(step(short), before=short))
    assert loss.not_placed == ()


def test_names_are_sorted_as_people_count() -> None:
    names = ["mini-10", "mini-2", "2mini", "mini", "mini-1"]
    assert sorted(names, key=natural_key) == ["mini", "mini-1", "mini-2", "mini-10", "2mini"]
