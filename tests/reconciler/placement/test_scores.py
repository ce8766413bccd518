"""Scores: each one alone, the profiles, size tiers, and explanations."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.deployments.actions import CreateReplica
from reconciler.deployments.execute import WriteContext, make_replica
from reconciler.deployments.explain import explain_nodes
from reconciler.deployments.placer import Assignment, Placer, place_replica
from reconciler.deployments.rollout.revisions import content_of, template_hash
from reconciler.placement.concurrency import MOST, DecodeCost, requests_at_pace
from reconciler.placement.inputs import Allocation, NodeView, PlacementRequest, request_for
from reconciler.placement.memory_proof import describe_concurrency, describe_proof, proof_of, prove
from reconciler.placement.scores import is_preferred, machine
from reconciler.placement.table import NodeTable
from schemas.deployment import ModelDeployment
from schemas.kv_cache import KvCache
from schemas.node import ModelReport, Taint
from schemas.placement import Placement, ScoreWeights, SizeMinimum, Toleration
from schemas.quantity import DEFAULT_CONCURRENCY, show
from tests.support.reconciler_nodes import HUB_MODEL
from tests.support.world import GEOMETRY, GIB, NOW, deployment, node


def make_request(**placement: object) -> PlacementRequest:
    return request_for(deployment(placement=Placement.model_validate(placement)))


def only(name: str) -> PlacementRequest:
    """Return a want for which nothing but one score counts."""
    names = ("speed", "pool", "taints", "headroom", "siblings", "spreading", "movement", "locality")
    weights = {**dict.fromkeys(names, 0), name: 1}
    return make_request(weights=ScoreWeights.model_validate(weights))


def where(*nodes: NodeView, of: PlacementRequest | None = None) -> str:
    wanted = of or make_request()
    placed = place_replica(wanted, nodes)
    assert isinstance(placed, Assignment)
    assert explain_nodes(wanted, nodes)[0].node == placed.node
    return placed.node


@pytest.mark.parametrize(
    ("nodes", "winner"),
    [
        pytest.param((node("c"), node("a"), node("b")), "a", id="ties-go-by-name"),
        pytest.param((node("a", memory_gib=64, replicas={"qwen": 1}), node("b", memory_gib=4)), "b", id="no-sibling"),
        pytest.param((node("a", replicas={"other": 9}), node("b")), "a", id="others-are-no-siblings"),
        pytest.param((node("a", used_bytes=GIB), node("b")), "b", id="the-emptier-node"),
    ],
)  # fmt: skip
def test_the_balanced_profile(nodes: tuple[NodeView, ...], winner: str) -> None:
    assert where(*nodes) == winner


def lacking(name: str, missing_gib: float) -> NodeView:
    folder = HUB_MODEL.folder
    report = ModelReport(path=folder, geometry=GEOMETRY, missing_bytes=int(missing_gib * GIB))
    return node(name, models={folder: report})


def hub_request(**placement: object) -> PlacementRequest:
    request = make_request(**placement)
    return replace(request, spec=request.spec.model_copy(update={"model": HUB_MODEL}))


@pytest.mark.parametrize("profile", ["Balanced", "BinPack", "Spread", "HardwareAware"])
def test_of_equal_nodes_the_one_that_lacks_the_fewest_bytes_wins(profile: str) -> None:
    wanted = hub_request(profile=profile)
    nodes = (lacking("a", 40), lacking("b", 20), lacking("c", 0), lacking("d", 0))
    assert where(*nodes, of=wanted) == "c"
    assert where(*nodes[:2], of=wanted) == "b"
    assert explain_nodes(wanted, nodes)[-1].missing_bytes == 40 * GIB


def test_bytes_to_fetch_do_not_stack_replicas() -> None:
    there = replace(lacking("a", 0), replicas={"qwen": 1})
    assert where(there, lacking("b", 400), of=hub_request()) == "b"


def test_only_models_of_hubs_have_bytes_to_fetch() -> None:
    (explanation,) = explain_nodes(make_request(weights={"locality": 50}), [node("a")])
    assert "locality" not in {part.name for part in explanation.parts}
    (explanation,) = explain_nodes(hub_request(), [lacking("a", 4)])
    assert {part.name: part.score for part in explanation.parts}["locality"] == 50


@pytest.mark.parametrize("profile", ["Balanced", "BinPack", "Spread", "HardwareAware"])
def test_where_a_replica_of_ours_ends_the_next_one_begins(profile: str) -> None:
    ends = Allocation(replica="qwen-0", deployment="qwen", bytes=GIB, is_ending=True)
    there = node("b", allocations=(ends,), used_bytes=GIB, replicas={"qwen": 1})
    wanted = request_for(deployment(placement=Placement.model_validate({"profile": profile})))
    placer = Placer(NodeTable((node("a"), there)))
    placer.discount("qwen", ["b"])  # as the planner does with what ends
    placed = placer.place(wanted)
    assert isinstance(placed, Assignment)
    assert placed.node == "b"
    # One that stays, or another's, is no reason to come.
    for tenant in (ends._replace(deployment="other"), ends._replace(is_ending=False)):
        other = replace(there, allocations=(tenant,), used_bytes=0)
        assert where(node("a"), other, of=wanted) == "a"


SOFT = Taint(key="owner", effect="PreferNoSchedule")


@pytest.mark.parametrize(
    ("score", "better"),
    [
        ("speed", {"bandwidth_gbps": 546.0}),
        ("hardware", {"chip": "Apple M4 Max", "gpu_cores": 40, "memory_bytes": 64 * GIB}),
        ("pool", {"pool_priority": 10}),
        ("headroom", {"allocatable_bytes": 16 * GIB}),
        ("packing", {"used_bytes": 4 * GIB}),
    ],
)
def test_each_score_alone(score: str, better: dict[str, Any]) -> None:
    winner = node("z", **better)
    assert where(node("a"), winner, of=only(score)) == "z"
    first, second = explain_nodes(only(score), [node("a"), winner])
    assert [part.name for part in first.parts] == [score]
    assert 100 >= first.score > second.score >= 0


def test_taints_that_only_ask_are_heeded_if_they_can_be() -> None:
    soft = node("a", taints=(SOFT,))
    assert where(soft, node("b"), of=only("taints")) == "b"
    assert where(soft) == "a"
    tolerant = make_request(tolerations=(Toleration(operator="Exists"),))
    assert where(soft, node("b"), of=tolerant) == "a"


def test_replicas_are_spread_over_labels() -> None:
    racks = [node(f"{rack}{at}", labels={"rack": rack}) for rack in "xy" for at in "12"]
    placer = Placer(NodeTable(racks))
    wanted = make_request(spread_by=("rack",))
    found = [placer.place(wanted) for _ in range(4)]
    assert [one.node for one in found if isinstance(one, Assignment)] == ["x1", "y1", "x2", "y2"]


@pytest.mark.parametrize(
    ("profile", "wanted"),
    [("Balanced", "empty"), ("Spread", "empty"), ("BinPack", "full"), ("HardwareAware", "ultra")],
)
def test_profiles(profile: str, wanted: str) -> None:
    full = node("full", used_bytes=4 * GIB)
    ultra = replace(
        node("ultra"), used_bytes=3 * GIB, replicas={"qwen": 1}, chip="Apple M3 Ultra",
        gpu_cores=80, memory_bytes=512 * 10**9, bandwidth_gbps=819,
    )  # fmt: skip
    assert where(node("empty"), full, ultra, of=make_request(profile=profile)) == wanted


def sized(name: str, *, gpu_cores: int, gib: int, parameters: int = 32_000_000_000) -> NodeView:
    geometry = GEOMETRY.model_copy(update={"parameters": parameters})
    report = ModelReport(path="qwen", geometry=geometry)
    return node(name, gpu_cores=gpu_cores, memory_bytes=gib * GIB, models={"qwen": report})


def test_nodes_that_are_big_enough_come_first_and_others_after_them() -> None:
    small = replace(sized("a", gpu_cores=20, gib=64), bandwidth_gbps=800)
    big = sized("b", gpu_cores=30, gib=64)
    assert where(small, big) == "b"
    assert where(small, replace(big, used_bytes=7 * GIB)) == "a"
    assert where(small, big, of=make_request(tier="Off")) == "a"
    first, second = explain_nodes(make_request(), [small, big])
    assert (first.is_preferred, second.is_preferred) == (True, False)


def test_thresholds_of_ones_own_replace_those_for_the_size() -> None:
    small, big = sized("a", gpu_cores=20, gib=64), sized("b", gpu_cores=30, gib=64)
    both = [replace(small, bandwidth_gbps=800), big]
    assert where(*both, of=make_request(tier=SizeMinimum(min_gpu_cores=20))) == "a"
    assert where(*both, of=make_request(tier=SizeMinimum(min_gpu_cores=21))) == "b"
    (first, second) = explain_nodes(make_request(tier=SizeMinimum(min_memory="65Gi")), both)
    assert (first.is_preferred, second.is_preferred) == (False, False)
    chosen = make_request(tier=SizeMinimum(preferred_chips=("Apple M4 Max",)))
    assert where(both[0], replace(big, chip="Apple M4 Max"), of=chosen) == "b"
    named = make_request(tier=SizeMinimum(preferred_nodes=("b",)))
    assert where(*both, of=named) == "b"
    assert where(both[0], replace(big, used_bytes=7 * GIB), of=named) == "a"


def test_among_nodes_that_are_too_small_the_best_is_still_the_best() -> None:
    placer = Placer(NodeTable([sized("a", gpu_cores=8, gib=8), sized("b", gpu_cores=8, gib=8)]))
    found = [placer.place(make_request()) for _ in range(2)]
    assert [one.node for one in found if isinstance(one, Assignment)] == ["a", "b"]


def test_a_model_of_unknown_size_has_no_tier() -> None:
    assert where(sized("a", gpu_cores=0, gib=1, parameters=0), node("b")) == "a"


def test_the_best_mac_that_was_sold_has_a_hundred_points() -> None:
    best = node("a", chip="Apple M5 Ultra", gpu_cores=80, memory_bytes=512 * GIB)
    assert machine(make_request(), best) == pytest.approx(100)
    newer = replace(best, chip="Apple M9 Ultra", gpu_cores=200, memory_bytes=2**50)
    assert machine(make_request(), newer) == 100


def test_the_tier_of_a_30b_model_counts_memory_in_gib() -> None:
    mac = sized("a", gpu_cores=40, gib=64)
    assert is_preferred(make_request(), mac)
    assert not is_preferred(make_request(), replace(mac, memory_bytes=65 * 10**9))


def test_an_explanation_has_it_all() -> None:
    nodes = [node("b"), node("a", is_cordoned=True), node("c", memory_gib=16)]
    explanations = explain_nodes(make_request(), nodes)
    assert [explanation.node for explanation in explanations] == ["c", "b", "a"]
    best, _, refused = explanations
    assert best.memory == prove(GEOMETRY, context_length=1024, concurrency=1)
    assert best.room_bytes == 16 * GIB
    assert {part.name: part.weight for part in best.parts} == {
        "speed": 10, "pool": 10, "taints": 20, "headroom": 20, "siblings": 50, "spreading": 40,
        "movement": 5,
    }  # fmt: skip
    assert refused.refusal is not None
    assert refused.refusal.reason == "NodeCordoned"
    assert (refused.parts, refused.score, refused.fits) == ((), 0.0, False)


# Qwen3-8B in 4 bits: 36 layers of 8 KV heads with 128 numbers, so a request of 4,096 tokens takes 0.56 GiB.
EIGHT_BILLION = GEOMETRY.model_copy(
    update={
        "weights_bytes": int(4.3 * GIB), "layers": 36, "kv_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "parameters": 8_190_000_000, "hidden_size": 4096, "ffn_size": 12_288, "heads": 32, "max_context": None,
    }
)  # fmt: skip


def auto(**fields: Any) -> ModelDeployment:
    return deployment(**{"context_length": 4096, "concurrency": "Auto", **fields})


def request(**fields: Any) -> PlacementRequest:
    return PlacementRequest(name="qwen", spec=auto(**fields).spec)


def mac(memory_gib: float, bandwidth_gbps: float, gpu_cores: int) -> NodeView:
    """Return a Mac with this memory for models."""
    models = {"qwen": ModelReport(path="qwen", geometry=EIGHT_BILLION)}
    speed: dict[str, Any] = {"bandwidth_gbps": bandwidth_gbps, "gpu_cores": gpu_cores}
    return node("a", memory_gib=memory_gib, models=models, **speed)


@pytest.mark.parametrize(
    ("memory_gib", "bandwidth_gbps", "gpu_cores", "expected", "limit"),
    [
        pytest.param(7.5, 68.25, 7, 3, "Memory", id="m1-10-gb-fewer-fit"),
        pytest.param(10.7, 120, 10, 4, "Memory", id="m4-16-gb"),
        pytest.param(17.1, 273, 20, 5, "Memory", id="m4-pro-24-gb"),
        pytest.param(36, 273, 20, 21, "GPUCores", id="m4-pro-48-gb"),
        pytest.param(72, 400, 40, 38, "MemoryBandwidth", id="m3-max-96-gb"),
        pytest.param(140, 800, 60, 64, "Most", id="m2-ultra-192-gb"),
        pytest.param(24, 60, 7, 4, "Least", id="slow-with-room"),
        pytest.param(140, 0, 0, 4, "UnknownHardware", id="unknown-hardware"),
        pytest.param(4, 273, 20, 1, "Memory", id="not-even-one-fits"),
    ],
)
def test_known_macs(
    memory_gib: float, bandwidth_gbps: float, gpu_cores: int, expected: int, limit: str
) -> None:
    proof = proof_of(request(), mac(memory_gib, bandwidth_gbps, gpu_cores))
    assert (proof.concurrency, proof.concurrency_limit) == (expected, limit)


def test_longer_contexts_and_quantized_caches_count() -> None:
    studio = mac(140, 800, 60)
    long = proof_of(request(context_length=32_768), studio).concurrency
    assert DEFAULT_CONCURRENCY < long < proof_of(request(), studio).concurrency


@given(
    st.integers(0, 300 * GIB),
    st.integers(0, 40 * GIB),
    st.integers(0, 10**12),
    st.floats(0, 1000),
    st.integers(0, 80),
)
def test_the_answer_is_within_its_bounds(
    weights: int, each: int, parameters: int, bandwidth: float, cores: int
) -> None:
    cost = DecodeCost(weights_bytes=weights, request_bytes=each, parameters=parameters)
    pace = requests_at_pace(cost, bandwidth_gbps=bandwidth, gpu_cores=cores)
    more = requests_at_pace(cost, bandwidth_gbps=2 * bandwidth, gpu_cores=2 * cores)
    assert DEFAULT_CONCURRENCY <= pace.requests <= more.requests <= MOST


def test_more_than_the_default_leave_half_of_the_mac_to_other_models() -> None:
    narrow = mac(24, 273, 20)
    proof = proof_of(request(), narrow)
    assert proof.concurrency > DEFAULT_CONCURRENCY
    assert proof.total_bytes <= 12 * GIB
    assert proof_of(request(concurrency=proof.concurrency + 1), narrow).total_bytes > 12 * GIB


def test_a_stated_size_is_for_the_default() -> None:
    stated = request(memory="20Gi")
    assert proof_of(stated, mac(140, 800, 60)).concurrency == DEFAULT_CONCURRENCY


def test_the_proof_says_where_the_number_comes_from() -> None:
    asked = request()
    text = describe_proof(proof_of(asked, mac(72, 400, 40)), asked.spec)
    assert "for 38 x 4096 tokens, requests by the Mac's memory bandwidth" in text


def test_the_replica_has_the_number_of_its_mac() -> None:
    made = auto()
    found = place_replica(request(), [mac(72, 400, 40)])
    assert isinstance(found, Assignment)
    action = CreateReplica(name="qwen-0", ranks=found.ranks, content=content_of(made))
    placed = make_replica(action, made, WriteContext(now=NOW, secret=str))
    assert placed.spec.concurrency == found.memory.concurrency == 38
    assert placed.spec.template == template_hash(made)


def test_shared_tokens_do_not_make_a_request_dearer() -> None:
    shared = request(kv_cache=KvCache(tokens=8192))
    proof = proof_of(shared, mac(72, 400, 40))
    # 38 whole contexts would be read in time, and these requests have less.
    assert proof.concurrency == 38
    assert proof.kv_cache_bytes < proof_of(request(), mac(72, 400, 40)).kv_cache_bytes


def test_the_figures_behind_the_number_are_said() -> None:
    asked, studio = request(), mac(72, 400, 40)
    proof = proof_of(asked, studio)
    text = describe_concurrency(asked, studio, proof)
    assert text.startswith(f"concurrency Auto is {proof.concurrency} on ")
    assert "70% of 400 GB/s reads weights of" in text
    assert "40 GPU cores compute" in text
    assert show(36 * GIB) in text
    unknown = mac(140, 0, 0)
    assert "are not known: 4" in describe_concurrency(asked, unknown, proof_of(asked, unknown))
    for declared in (request(concurrency=2), request(memory="20Gi")):
        assert describe_concurrency(declared, studio, proof_of(declared, studio)) == ""
