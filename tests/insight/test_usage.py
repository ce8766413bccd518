"""Usage rows of `fleetctl top`, computed from given samples."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fleetctl.output import usage_tables
from insight import usage
from insight.usage import Figure
from insight.usage_samples import (
    DeploymentCounts,
    FleetSample,
    NodeMemory,
    NodeSample,
    RankSample,
    ReplicaPlacement,
)
from reconciler.deployments.demand.gateway_metrics import GatewaySample, VersionSample

GIB = 1 << 30
MEMORY = NodeMemory(total_bytes=64 * GIB, available_bytes=48 * GIB, allocatable_bytes=40 * GIB)


def rank(
    replica: str, number: int = 0, *, tokens: float | None = 0, state: str = "Ready"
) -> RankSample:
    is_told = tokens is not None
    return RankSample(
        replica=replica,
        rank=number,
        state=state,
        tokens=tokens,
        in_flight=2 if is_told else None,
        waiting=1 if is_told else None,
        active_bytes=10 * GIB if is_told else None,
    )


def node(name: str, *ranks: RankSample) -> NodeSample:
    return NodeSample(name=name, memory=MEMORY, ranks=ranks, is_complete=True)


def sample(*, waiting: int, ended: float, first: float = 0) -> GatewaySample:
    buckets = {0.1: first, 0.2: first, float("inf"): first}
    version = VersionSample(outcomes={"ok": ended}, buckets=buckets)
    return GatewaySample(waiting={"qwen": waiting}, versions={"qwen": {"t": version}})


def look(at_s: float, *, tokens: float, ended: float) -> FleetSample:
    return FleetSample(
        at_s=at_s,
        nodes=(
            node("mac-1", rank("qwen-0", tokens=tokens), rank("split-0", 0, tokens=tokens)),
            node("mac-2", rank("split-0", 1, tokens=tokens)),
        ),
        deployments=(
            DeploymentCounts(name="qwen", ready=1, wanted=1),
            DeploymentCounts(name="split", ready=1, wanted=1),
        ),
        replicas={
            "qwen-0": ReplicaPlacement(deployment="qwen", nodes=("mac-1",)),
            "split-0": ReplicaPlacement(deployment="split", nodes=("mac-1", "mac-2")),
        },
        gateways={"g": sample(waiting=3, ended=ended, first=ended)},
    )


BEFORE, NOW = look(10, tokens=100, ended=4), look(12, tokens=150, ended=7)


def test_nodes() -> None:
    assert usage_tables.node_table(usage.node_rows(BEFORE, NOW)) == (
        "NAME    MEMORY     MEMORY%   MODELS     MODELS%   ENGINES   IN FLIGHT   QUEUE   TOKENS/S\n"
        "mac-1   16.0 GiB   25%       20.0 GiB   50%       2         4           2       50.0\n"
        "mac-2   16.0 GiB   25%       10.0 GiB   25%       1         0           0       0.0"
    )


def test_models() -> None:
    assert usage_tables.model_table(usage.model_rows(BEFORE, NOW)) == (
        "NAME    READY   MEMORY     IN FLIGHT   QUEUE   REQUESTS/S   TOKENS/S   FIRST TOKEN\n"
        "qwen    1/1     10.0 GiB   2           4       1.5          25.0       50ms\n"
        "split   1/1     20.0 GiB   2           1       0.0          25.0       -"
    )


def test_unreported_values_are_unknown() -> None:
    gone = replace(NOW, nodes=(NOW.nodes[0], NodeSample(name="mac-2")), has_all_gateways=False)
    assert usage_tables.node_table(usage.node_rows(BEFORE, gone), headers=False).splitlines()[1].split() == [
        "mac-2", *("?" * 8)
    ]  # fmt: skip
    split = usage_tables.model_table(usage.model_rows(BEFORE, gone), headers=False).splitlines()[1]
    assert split.split() == ["split", "1/1", "10.0", "GiB+", "2+", "1+", "0.0+", "25.0+", "-"]
    [tree] = [usage.row_tree(row) for row in usage.model_rows(BEFORE, gone) if row.name == "split"]
    assert (tree["tokensPerSecond"], "tokensPerSecond" in str(tree["partial"])) == (25.0, True)


def test_a_starting_engine_does_not_hide_others() -> None:
    starting = rank("new-0", tokens=None, state="Loading")
    silent = rank("new-0", tokens=None)
    for rank_sample, shown in ((starting, "25.0"), (silent, "25.0+")):
        nodes = (node("mac-1", rank("qwen-0", tokens=150), rank_sample),)
        row = usage_tables.node_table(
            usage.node_rows(BEFORE, replace(NOW, nodes=nodes)), headers=False
        )
        assert row.split()[-1] == shown


def test_a_restarted_engine_counts_from_zero() -> None:
    again = replace(NOW, nodes=(node("mac-1", rank("qwen-0", tokens=30)),))
    assert usage.node_rows(BEFORE, again)[0].tokens_per_second == Figure(value=15.0)


def test_reasons_are_those_of_the_rows() -> None:
    told = {"mac-1": ("mac-1 is silent",), "mac-2": ("mac-2 is old",), "mac-3": ("mac-3 is gone",)}
    seen = replace(NOW, node_reasons=told, gateway_reasons=("a gateway is silent",))
    assert usage.node_reasons(seen) == ("mac-1 is silent", "mac-2 is old", "mac-3 is gone")
    # No replica runs on mac-3.
    both = ("a gateway is silent", "mac-1 is silent", "mac-2 is old")
    assert usage.model_reasons(seen) == both
    fleet_sample = replace(seen, deployments=NOW.deployments[:1])
    assert usage.model_reasons(fleet_sample) == both[:2]
    lost = replace(seen, nodes=NOW.nodes[:1], node_reasons={}, gateway_reasons=())
    assert usage.model_reasons(lost) == (
        "node/mac-2: it has replicas, but it is not in the fleet any more",
    )
    assert usage.node_reasons(lost) == ()


def test_order() -> None:
    rows = usage.node_rows(BEFORE, NOW)
    assert [r.name for r in usage.sort_rows(rows[::-1], usage.NODE_ORDERS, "name")] == [
        "mac-1",
        "mac-2",
    ]
    assert [r.name for r in usage.sort_rows(rows[::-1], usage.NODE_ORDERS, "models")] == [
        "mac-1",
        "mac-2",
    ]
    unknown = usage.node_rows(BEFORE, replace(NOW, nodes=(NodeSample(name="a"), *NOW.nodes)))
    assert [r.name for r in usage.sort_rows(unknown, usage.NODE_ORDERS, "tokens")][-1] == "a"


@given(st.lists(st.sampled_from(["Ready", "Loading", "Ended"]), max_size=4), st.booleans())
def test_a_value_is_incomplete_only_if_a_part_is_missing(states: list[str], told: bool) -> None:
    ranks = [rank(f"r-{n}", tokens=10 if told else None, state=s) for n, s in enumerate(states)]
    fleet_sample = replace(NOW, nodes=(node("m", *ranks),))
    row = usage.node_rows(fleet_sample, replace(fleet_sample, at_s=fleet_sample.at_s + 1))[0]
    is_missing = not told and "Ready" in states
    assert (row.in_flight.value is None or not row.in_flight.is_complete) is is_missing
