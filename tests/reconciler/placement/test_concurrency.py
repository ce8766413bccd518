"""concurrency: Auto by the hardware of known Macs, and by the memory that a Mac has."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.deployments.actions import CreateReplica
from reconciler.deployments.execute import WriteContext, make_replica
from reconciler.deployments.placer import Assignment, place_replica
from reconciler.deployments.rollout.revisions import content_of, template_hash
from reconciler.placement.concurrency import MOST, DecodeCost, requests_at_pace
from reconciler.placement.inputs import NodeView, PlacementRequest
from reconciler.placement.memory_proof import describe_proof, proof_of
from schemas.deployment import ModelDeployment
from schemas.kv_cache import KvCache
from schemas.node import ModelReport
from schemas.quantity import DEFAULT_CONCURRENCY
from tests.support.world import GEOMETRY, GIB, NOW, deployment, node

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
    speed = {"bandwidth_gbps": bandwidth_gbps, "gpu_cores": gpu_cores}
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
