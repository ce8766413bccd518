"""The engine's metrics under vLLM's names: every name has the number of the engine's own, after a real request."""

import contextlib
from pathlib import Path

import pytest

from machinery.prometheus import Sample, parse_samples
from schemas.wire import vllm_metrics
from tests.support.engine_adapters import make_adapter
from tests.support.engine_process import Engine, Start, eventually
from tests.support.prometheus_tools import check_metrics

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

HISTOGRAMS = (
    vllm_metrics.FIRST_TOKEN,
    vllm_metrics.BETWEEN_TOKENS,
    vllm_metrics.PER_TOKEN,
    vllm_metrics.WHOLE,
    vllm_metrics.QUEUE,
    vllm_metrics.INFERENCE,
    vllm_metrics.PREFILL,
    vllm_metrics.DECODE,
    vllm_metrics.PROMPT_LENGTHS,
    vllm_metrics.GENERATION_LENGTHS,
)
GAUGES = (vllm_metrics.RUNNING, vllm_metrics.WAITING, vllm_metrics.KV_USAGE)
COUNTERS = (
    vllm_metrics.PROMPT_TOKENS,
    vllm_metrics.GENERATION_TOKENS,
    vllm_metrics.PREFIX_QUERIES,
    vllm_metrics.PREFIX_HITS,
    vllm_metrics.FINISHED,
)


def scrape(engine: Engine, path: str = vllm_metrics.PATH) -> list[Sample]:
    reply = engine.request("GET", path)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    check_metrics(reply.raw)
    return list(parse_samples(reply.raw.decode()))


def total(samples: list[Sample], name: str) -> float:
    found = [float(sample.value) for sample in samples if sample.name == name]
    assert found, name
    return sum(found)


def test_every_name_has_data(engine: Engine) -> None:
    defined = {
        name
        for value in vars(vllm_metrics).values()
        for name in (value if isinstance(value, tuple) else (value,))
        if isinstance(name, str) and name.startswith("vllm:")
    }
    tested = {name for names in (*HISTOGRAMS, *GAUGES, *COUNTERS) for name in names}
    others = {vllm_metrics.LORA, vllm_metrics.CACHE_CONFIG, *vllm_metrics.PREEMPTIONS}
    assert defined == tested | others
    prompt = [number % 50 + 300 for number in range(200)]
    for _ in range(2):  # the second finds the prompt in the cache
        reply = engine.post("/v1/completions", prompt=prompt, max_tokens=5, temperature=0)
        assert reply.status == 200
    eventually(lambda: total(scrape(engine), "vllm:prefix_cache_hits_total") > 0)
    ours, theirs = scrape(engine, "/metrics"), scrape(engine)
    for name in (name for names in HISTOGRAMS for name in names):
        assert total(theirs, f"{name}_count") > 0, name
        assert total(theirs, f"{name}_sum") > 0, name
        buckets = [their for their in theirs if their.name == f"{name}_bucket"]
        assert buckets[-1].labels["le"] == "+Inf"
        assert float(buckets[-1].value) == total(theirs, f"{name}_count")
    for name in (name for names in COUNTERS for name in names):
        assert total(theirs, name) > 0, name
    for name in (name for names in GAUGES for name in names):
        assert total(theirs, name) == 0, name
    for vllm, own in (
        ("request_prompt_tokens_sum", "request_prompt_tokens_sum"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("inter_token_latency_seconds_sum", "inter_token_latency_seconds_sum"),
        ("time_per_output_token_seconds_sum", "inter_token_latency_seconds_sum"),
        ("request_time_per_output_token_seconds_sum", "time_per_output_token_seconds_sum"),
        ("e2e_request_latency_seconds_count", "e2e_request_latency_seconds_count"),
    ):
        expected = total(ours, f"fleet_engine_{own}")
        assert total(theirs, f"vllm:{vllm}") == pytest.approx(expected, abs=1e-4), vllm
    assert {sample.labels["model_name"] for sample in theirs} == {"tiny"}
    assert {sample.labels["engine"] for sample in theirs} == {"0"}


def test_the_room_for_caches(engine: Engine) -> None:
    (sample,) = [sample for sample in scrape(engine) if sample.name == vllm_metrics.CACHE_CONFIG]
    assert sample.labels["block_size"] == "64"
    # 16 slots of 4096 tokens, if the memory suffices.
    assert 64 <= int(sample.labels["num_gpu_blocks"]) <= 16 * 64


@pytest.mark.ci
def test_an_engine_with_adapters_shows_them(start: Start, tiny: Path, tmp_path: Path) -> None:
    engine = start(tiny, adapters={"tiny:poet": make_adapter(tmp_path / "poet", tiny)})
    eventually(engine.is_ready, within_s=60)

    def lora() -> Sample:
        return next(sample for sample in scrape(engine) if sample.name == vllm_metrics.LORA)

    assert lora().labels["running_lora_adapters"] == ""
    with contextlib.closing(engine.begin(model="tiny:poet", max_tokens=3000)):
        eventually(lambda: lora().labels["running_lora_adapters"] == "tiny:poet")
    assert lora().labels["max_lora"] == "1"
    assert lora().labels["waiting_lora_adapters"] == ""
    assert float(lora().value) > 1.7e9
