"""Planning at the scale of thousands of Macs: `make bench-placement`. No store, no network: decisions alone.

A fleet of unlike Macs (every chip that was sold), with pools, racks, taints and cordons; deployments of models of
all sizes with every kind of wish. Prints tables, and as its last line one JSON object, ratios first.
"""

import gc
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tabulate import tabulate

from bench.harness import finish, sized
from bench.looks import looks
from reconciler.deployments.explain import explain_nodes
from reconciler.deployments.placer import Assignment, Placer
from reconciler.placement.inputs import Allocation, NodeView, PlacementRequest, request_for
from reconciler.placement.table import NodeTable
from schemas.chips import CHIPS
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource, Resources
from schemas.meta import ObjectMeta
from schemas.node import LayerGroup, ModelGeometry, ModelReport, Taint
from schemas.placement import Placement, Profile, Toleration

T = TypeVar("T")
GIB = 2**30
# kubernetes/test/integration/scheduler_perf: threshold of SchedulingBasic, 5,000 nodes and 10,000 pods.
KUBE_SCHEDULER_PODS_PER_S = 680
NODES, REPLICAS, PER_DEPLOYMENT = sized((5000, 10_000, 10), smoke=(100, 200, 10))
ROUNDS = sized(5, smoke=1)
CURVE = sized((50, 500, 5000), smoke=(20, 50, 100))


# GiB of weights, layers and parameters by model.
SIZES = {
    "0.6b": (0.4, 28, 0.6e9),
    "3b": (1.8, 28, 3e9),
    "8b": (4.5, 36, 8e9),
    "14b": (8.0, 40, 14e9),
    "32b": (18.0, 64, 32e9),
    "70b": (40.0, 80, 70e9),
}


def reports() -> dict[str, ModelReport]:
    """Return what nodes say of each model; equal reports are one object, as the reconciler keeps them."""
    return {
        name: ModelReport(
            path=name,
            geometry=ModelGeometry(
                model_type="llama",
                weights_bytes=int(gib * GIB),
                layers=layers,
                kv_heads=8,
                head_dim=128,
                kv_element_bytes=2,
                vocab_size=128_000,
                max_context=131_072,
                groups=(
                    LayerGroup(kind="Full", count=layers, kv_heads=8, head_dim=128, value_dim=128),
                ),
                parameters=int(parameters),
                hidden_size=4096,
                ffn_size=14_336,
                heads=32,
            ),
        )
        for name, (gib, layers, parameters) in SIZES.items()
    }


def fleet(number: int, dice: random.Random) -> tuple[NodeView, ...]:
    """Return unlike Macs."""
    models = reports()
    node_views = []
    for at in range(number):
        chip = dice.choice(CHIPS)
        memory = dice.choice(chip.memory_gib) * GIB
        name = f"mac-{at:05}"
        taint = (Taint(key="owner-active", effect=dice.choice(("NoSchedule", "PreferNoSchedule"))),)
        node_views.append(
            NodeView(
                name=name,
                is_ready=dice.random() > 0.02,
                is_cordoned=dice.random() < 0.02,
                allocatable_bytes=memory * 3 // 4,
                labels={
                    "fleet/node": name,
                    "rack": f"r{at % 200}",
                    "site": f"s{at % 7}",
                    "fleet/os": "macOS",
                },
                pools=frozenset({dice.choice(("studio", "desk", "lab"))}),
                models=models,
                chip=chip.name,
                gpu_cores=dice.choice(chip.gpu_cores),
                memory_bytes=memory,
                bandwidth_gbps=chip.bandwidth_gbps,
                taints=taint if dice.random() < 0.1 else (),
                pool_priority=dice.choice((0, 50)),
            )
        )
    return tuple(node_views)


def deployments(number: int, dice: random.Random, *, prefix: str = "d") -> list[PlacementRequest]:
    """Return what is to be placed: mostly small models, with wishes of every kind."""
    profiles: tuple[Profile, ...] = ("Balanced", "BinPack", "Spread", "HardwareAware")
    placement_requests = []
    for at in range(number):
        model = dice.choices(tuple(SIZES), weights=(30, 25, 25, 10, 8, 2))[0]
        placement = Placement(
            pools=dice.choice(((), (), ("studio",), ("lab", "desk"))),
            tolerations=dice.choice(((), (), (Toleration(operator="Exists"),))),
            min_gpu_cores=dice.choice((0, 0, 0, 10)),
            max_replicas_per_node=dice.choice((None, None, 2)),
            spread_by=dice.choice(((), (), ("rack",), ("site",))),
            profile=dice.choice(profiles),
        )
        spec = ModelDeploymentSpec(
            model=ModelSource(path=model),
            replicas=PER_DEPLOYMENT,
            context_length=dice.choice((2048, 4096, 8192)),
            concurrency=dice.choice((1, 2, 4)),
            placement=placement,
        )
        metadata = ObjectMeta(name=f"{prefix}{at:05}", uid=str(at))
        placement_requests.append(request_for(ModelDeployment(metadata=metadata, spec=spec)))
    return placement_requests


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return how long it took; by the processor's clock, so that neighbours on this machine count less."""
    gc.collect()
    begin = time.process_time()
    done = work()
    return time.process_time() - begin, done


def place_all(
    nodes: Sequence[NodeView], wants: Sequence[PlacementRequest], per: int
) -> dict[str, list[Assignment]]:
    """Place everything from nothing, deployment by deployment, as the reconciler does."""
    placer = Placer(NodeTable(nodes))
    return {want.name: placed(placer, want, per) for want in wants}


def placed(placer: Placer, want: PlacementRequest, number: int) -> list[Assignment]:
    """Place so many replicas, or as many as fit."""
    assignments = []
    for _ in range(number):
        outcome = placer.place(want)
        if not isinstance(outcome, Assignment):
            break
        assignments.append(outcome)
    return assignments


def occupied(nodes: Sequence[NodeView], done: dict[str, list[Assignment]]) -> tuple[NodeView, ...]:
    """Return the nodes as they are observed once all of that runs."""
    allocations: dict[str, list[Allocation]] = {}
    for name, replicas in done.items():
        for ordinal, assignment in enumerate(replicas):
            tenant = Allocation(
                replica=f"{name}-{ordinal}",
                deployment=name,
                bytes=assignment.memory.total_bytes,
                version=1,
            )
            allocations.setdefault(assignment.node, []).append(tenant)
    return tuple(
        replace(
            node,
            used_bytes=sum(allocation.bytes for allocation in there),
            replicas=dict(Counter(allocation.deployment for allocation in there)),
            allocations=tuple(there),
        )
        for node in nodes
        for there in [allocations.get(node.name, [])]
    )


def reference(nodes: Sequence[NodeView], want: PlacementRequest, number: int) -> int:
    """Place node by node, with the readable functions alone; the same decisions."""
    by_name = {node.name: node for node in nodes}
    for at in range(number):
        best = explain_nodes(want, tuple(by_name.values()))[0]
        if best.memory is None:
            return at
        taken = by_name[best.node]
        by_name[best.node] = replace(
            taken,
            used_bytes=taken.used_bytes + best.memory.total_bytes,
            replicas={**taken.replicas, want.name: taken.replicas.get(want.name, 0) + 1},
        )
    return number


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n{title}\n{tabulate(rows, headers=columns)}")


def from_scratch() -> tuple[dict[str, float], tuple[NodeView, ...]]:
    """10,000 replicas onto 5,000 Macs that run nothing; the table is made within the time."""
    dice = random.Random(4)
    nodes, wants = fleet(NODES, dice), deployments(REPLICAS // PER_DEPLOYMENT, dice)
    runs = [timed(lambda: place_all(nodes, wants, PER_DEPLOYMENT)) for _ in range(ROUNDS)]
    done = runs[0][1]
    number = sum(map(len, done.values()))
    rates = [number / seconds for seconds, _ in runs]
    show(
        f"From scratch: {number} replicas of {len(wants)} deployments onto {NODES} nodes",
        ("placements/s, median", "worst", "best"),
        [(f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}")],
    )
    return {"per_s": statistics.median(rates), "placed": number}, occupied(nodes, done)


def incremental(nodes: tuple[NodeView, ...]) -> dict[str, float]:
    """One pass over 10 new deployments with 10 replicas each, on the fleet that runs the 10,000."""
    dice = random.Random(5)
    table = NodeTable(nodes)
    warm = deployments(10, dice, prefix="w")
    for want in warm:
        placed(Placer(table), want, PER_DEPLOYMENT)
    results = {}
    cases = {
        "100 replicas that fit": [deployments(10, dice, prefix=f"n{at}-") for at in range(ROUNDS)],
        "100 that fit nowhere": [
            [too_big(want) for want in deployments(10, dice, prefix=f"b{at}-")]
            for at in range(ROUNDS)
        ],
    }
    rows = []
    for title, rounds in cases.items():
        times, number = [], 0
        for wants in rounds:
            # What the reconciler does between two passes: one node changed, the rest is taken over.
            changed = (replace(nodes[0], used_bytes=nodes[0].used_bytes + 1), *nodes[1:])

            def one_pass(
                wants: list[PlacementRequest] = wants, now: tuple[NodeView, ...] = changed
            ) -> int:
                placer = Placer(NodeTable(now, before=table))
                return sum(len(placed(placer, want, PER_DEPLOYMENT)) for want in wants)

            seconds, number = timed(one_pass)
            times.append(seconds * 1000)
        results[title] = statistics.median(times)
        rows.append((title, f"{number}", f"{results[title]:.1f}", f"{max(times):.1f}"))
    show("One pass on the full fleet", ("", "placed", "ms, median", "worst"), rows)
    return results


def too_big(want: PlacementRequest) -> PlacementRequest:
    resources = Resources(memory="600Gi")
    return replace(want, spec=want.spec.model_copy(update={"resources": resources}))


def curve() -> dict[int, tuple[float, float]]:
    """Cost of a placement by the number of nodes: two replicas a node, ours and the reference."""
    rows, found = [], {}
    for number in CURVE:
        dice = random.Random(7)
        nodes = fleet(number, dice)
        wants = deployments(number * 2 // PER_DEPLOYMENT, dice)
        runs = [timed(lambda: place_all(nodes, wants, PER_DEPLOYMENT)) for _ in range(ROUNDS)]
        placements = max(1, sum(map(len, runs[0][1].values())))
        ours = min(seconds for seconds, _ in runs) / placements
        few = max(2, 400 // number)
        seconds, times = timed(lambda: reference(nodes, wants[0], few))
        plain = seconds / max(1, times)
        found[number] = ours, plain
        rows.append(
            (f"{number}", f"{ours * 1e6:.0f}", f"{plain * 1e6:,.0f}", f"{plain / ours:,.0f}")
        )
    show(
        "Microseconds a placement by nodes",
        ("nodes", "table", "node by node", "ratio"),
        rows,
    )
    return found


def main() -> None:
    scratch, full = from_scratch()
    passes = incremental(full)
    by_nodes = curve()
    seen = looks(NODES, REPLICAS)
    show(
        f"One look at {NODES} nodes with {REPLICAS} replicas, through the caches",
        ("", "ms"),
        [(name.removesuffix("_ms").replace("_", " "), f"{ms}") for name, ms in seen.items()],
    )
    ours, plain = by_nodes[NODES]
    growth = (ours / by_nodes[CURVE[0]][0]) / (NODES / CURVE[0])
    compared = {
        "ratio_to_kube_scheduler_680_per_s": round(scratch["per_s"] / KUBE_SCHEDULER_PODS_PER_S, 1),
        "ratio_to_node_by_node": round(plain / ours, 1),
        "ratio_of_growth_to_linear_50_to_5000": round(growth, 3),
    }
    figures = {
        "placements_per_s": round(scratch["per_s"]),
        "placed": scratch["placed"],
        "pass_100_new_ms": round(passes["100 replicas that fit"], 2),
        "pass_100_unplaceable_ms": round(passes["100 that fit nowhere"], 2),
        **seen,
        "us_per_placement_by_nodes": {
            str(nodes): round(pair[0] * 1e6, 1) for nodes, pair in by_nodes.items()
        },
    }
    finish("placement", compared, figures)


if __name__ == "__main__":
    main()
