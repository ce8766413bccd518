"""Random fleets and requests for properties of placement: small, unequal, full of ties and problems.

Hypothesis draws the number of nodes and a seed; a random generator makes the rest, because drawing hundreds of fields
would take longer than the tests.
"""

import random

from hypothesis import strategies as st

from reconciler.placement.inputs import (
    Allocation,
    NodeView,
    PlacementRequest,
    Rejection,
    request_for,
)
from schemas.chips import CHIPS
from schemas.deployment import DraftModel, HubReference, ModelSource
from schemas.kv_cache import KvCache
from schemas.node import AdapterReport, ModelReport, Taint
from schemas.placement import Placement, ScoreWeights, Toleration
from tests.support.world import GEOMETRY, GIB, deployment

NAMES = "abcdefgh"
OTHERS = ("llama", "phi", "qwen")
BIG = GEOMETRY.model_copy(update={"weights_bytes": 6 * GIB, "parameters": 8_000_000_000})
HUB_MODEL = ModelSource(hub=HubReference(repo="mlx-community/qwen", revision="ab" * 20))
REPORTS = (
    ModelReport(path="qwen", geometry=GEOMETRY.model_copy(update={"parameters": 13_000_000_000})),
    ModelReport(path="qwen", geometry=BIG),
    ModelReport(path="qwen", geometry=BIG, missing_bytes=3 * GIB),
    ModelReport(path="qwen", geometry=GEOMETRY.model_copy(update={"unknown": "what is it"})),
    ModelReport(path="qwen", reason="ModelNotFound", message="there is nothing"),
    None,
)
TAINTS = tuple(
    Taint.model_validate({"key": key, "effect": effect})
    for key in ("gpu", "owner")
    for effect in ("NoSchedule", "PreferNoSchedule", "NoExecute")
)
HOLDS = (
    Rejection(reason="NodeWithheld", message="its pools withhold it"),
    Rejection(reason="NodeFlapping", message="it came and went"),
    Rejection(reason="InsufficientDisk", message="it has none", need=2 * GIB, have=GIB),
)
ADAPTERS = (
    AdapterReport(path="law", weights_bytes=GIB // 4),
    AdapterReport(path="law", weights_bytes=GIB // 2),
    AdapterReport(path="law", reason="AdapterUnusable", message="it is broken"),
    None,
)
KEPT = (
    None,
    KvCache(bits=8),
    KvCache(window=256),
    KvCache(bits=4, prefix_bytes="1Gi"),
)
SOURCES = (
    ModelSource(path="qwen"),
    ModelSource(path="qwen", adapter="law"),
    ModelSource(path="qwen", adapter="law", draft=DraftModel(path="small", tokens=5)),
    ModelSource(path="qwen", draft=DraftModel(path="small")),
    *[HUB_MODEL] * 4,
)
SCORES = (
    *("speed", "hardware", "headroom", "packing", "siblings", "spreading"),
    *("movement", "locality"),
)


def tenants_of(dice: random.Random, name: str) -> tuple[Allocation, ...]:
    """Return up to three replicas of whomever."""
    return tuple(
        Allocation(
            replica=f"{name}-{at}-{dice.randrange(100)}",
            deployment=dice.choice(OTHERS),
            bytes=dice.randint(1, 4 * GIB),
            priority=dice.randint(-2, 2),
            is_ending=dice.random() < 0.3,
            model=dice.choice(("", HUB_MODEL.folder)),
        )
        for at in range(dice.randrange(4))
    )


def drafts_of(dice: random.Random) -> dict[str, ModelReport]:
    """Return a node's report on the draft model, if it inspected it."""
    drafts = (
        *[ModelReport(path="small", geometry=GEOMETRY)] * 5,
        ModelReport(path="small", geometry=GEOMETRY.model_copy(update={"max_context": 64})),
        ModelReport(path="small", reason="ModelNotFound", message="there is nothing"),
    )
    return {"small": dice.choice(drafts)} if dice.random() > 0.1 else {}


def reports_of(model: ModelReport | None) -> dict[str, ModelReport]:
    """Return a node's report on a model, which is in a folder and on a hub."""
    if model is None:
        return {}
    paths = ("qwen", HUB_MODEL.folder)
    return {path: model.model_copy(update={"path": path}) for path in paths}


def node_of(dice: random.Random, name: str) -> NodeView:
    """Return a node; most are ready, so that most situations are about the rest."""
    there = tenants_of(dice, name)
    used = sum(allocation.bytes for allocation in there)
    chip = dice.choice(CHIPS)
    model = dice.choice(REPORTS[:3] * 2 + REPORTS)
    labels = {"rack": dice.choice("12"), "site": dice.choice("xy")}
    return NodeView(
        name=name,
        is_ready=dice.random() > 0.1,
        is_cordoned=dice.random() < 0.1,
        allocatable_bytes=used + dice.randrange(17) * GIB,
        used_bytes=used,
        labels={key: value for key, value in labels.items() if dice.random() < 0.7},
        pools=frozenset(pool for pool in ("lab", "desk") if dice.random() < 0.6),
        models=reports_of(model) | drafts_of(dice),
        adapters={report.path: report for report in (dice.choice(ADAPTERS),) if report is not None},
        reserved_by_group="pair" if dice.random() < 0.1 else "",
        replicas={
            one: sum(t.deployment == one for t in there) for one in {t.deployment for t in there}
        },
        allocations=there,
        promised_bytes=dice.choice([0, 0, GIB]),
        chip=chip.name,
        gpu_cores=dice.choice(chip.gpu_cores),
        memory_bytes=chip.memory_gib[0] * GIB,
        bandwidth_gbps=dice.choice([0.0, chip.bandwidth_gbps]),
        taints=(dice.choice(TAINTS),) if dice.random() < 0.2 else (),
        pool_priority=dice.choice([0, 50]),
        holds=(dice.choice(HOLDS),) if dice.random() < 0.15 else (),
    )


seeds = st.integers(0, 2**32)
fleets = st.builds(
    lambda number, seed: tuple(
        node_of(random.Random(seed + at), NAMES[at]) for at in range(number)
    ),
    st.integers(0, len(NAMES)),
    seeds,
)
allocations = st.builds(lambda seed: tenants_of(random.Random(seed), "a"), seeds)


def placement_of(dice: random.Random) -> Placement:
    """Return wishes; most of them are few."""
    weights = {name: dice.randrange(101) for name in SCORES if dice.random() < 0.2}
    return Placement(
        pools=dice.choice([(), (), (), ("lab",)]),
        node_selector=dice.choice([{}, {}, {}, {"rack": "1"}]),
        tolerations=dice.choice([(), (Toleration(operator="Exists"),)]),
        chips=dice.choice([(), (), (), ("Apple M4", "Apple M4 Pro", "Apple M1")]),
        min_gpu_cores=dice.choice([0, 0, 10, 16]),
        tier=dice.choice(["Auto", "Off"]),
        max_replicas_per_node=dice.choice([None, None, 1, 2]),
        spread_by=dice.choice([(), ("rack",), ("rack", "site")]),
        profile=dice.choice(["Balanced", "BinPack", "Spread", "HardwareAware"]),
        weights=ScoreWeights.model_validate(weights),
    )


def want_from(seed: int) -> PlacementRequest:
    """Return a want for the model that the fleets have."""
    dice = random.Random(seed)
    made = deployment(
        placement=placement_of(dice),
        priority=dice.randint(-1, 2),
        memory=dice.choice(["", "", "2Gi"]),
    )
    apart = dice.choice([frozenset[str](), frozenset({"phi"})])
    more: dict[str, object] = {"model": SOURCES[0], "kv_cache": None}
    if dice.random() < 0.5:
        more = {"model": dice.choice(SOURCES), "kv_cache": dice.choice(KEPT)}
    more["concurrency"] = dice.choice([1, "Auto"])
    made = made.model_copy(update={"spec": made.spec.model_copy(update=more)})
    return request_for(made, apart_from=apart)


def wants() -> st.SearchStrategy[PlacementRequest]:
    """Return a strategy for requests on a single Mac."""
    return st.builds(want_from, seeds)
