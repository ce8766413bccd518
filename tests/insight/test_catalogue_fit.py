"""The catalogue against Macs: chosen bits, rates that bandwidth allows, and the order."""

from typing import Any

from insight import catalogue_fit
from insight.catalogue_fit import FAST_TOKENS_PER_S, MacFit, ModelFit
from models import footprint
from models.catalogue.catalogue import shipped_catalogue
from models.model_files import model_geometry
from nodeagent.hardware.macos import gpu_memory_limit
from reconciler.placement.inputs import NodeView, PlacementRequest
from schemas.deployment import ModelDeploymentSpec, ModelSource

GIB = 2**30


def mac(gib: int, name: str = "mac", **more: Any) -> NodeView:
    limit, _ = gpu_memory_limit(gib * GIB, None)
    return NodeView(
        name=name, is_ready=True, memory_bytes=gib * GIB, allocatable_bytes=limit, **more
    )


def fits_of(*nodes: NodeView, context_length: int = 4096) -> dict[str, ModelFit]:
    spec = ModelDeploymentSpec(
        model=ModelSource(path="model"), concurrency=1, context_length=context_length
    )
    kinds = catalogue_fit.kinds_of(nodes)
    models = catalogue_fit.fit_catalogue(
        shipped_catalogue(), PlacementRequest(name="", spec=spec), kinds
    )
    assert len(models) == len(shipped_catalogue().models)
    return {model.name: model for model in models}


def only(model: ModelFit) -> MacFit:
    (fit,) = model.fits
    return fit


def test_the_most_bits_that_fit_and_are_fast_are_chosen() -> None:
    slow = fits_of(mac(64, bandwidth_gbps=200.0))
    fast = fits_of(mac(64, bandwidth_gbps=800.0))
    for models, bits in ((slow, 4), (fast, 8)):
        fit = only(models["Qwen3-32B"])
        assert (fit.refusal, fit.entry.bits) == (None, bits)
    # Eight bits fit as well on the slow Mac, and would be below the rate.
    assert only(fast["Qwen3-32B"]).rates[0] * 200 / 800 < FAST_TOKENS_PER_S
    # A mixture of experts reads a tenth of its weights for a token.
    moe = only(slow["Qwen3-30B-A3B"])
    assert moe.entry.bits == 8
    geometry = model_geometry(moe.entry.facts, casts_to_float32=False)
    assert footprint.token_read_bytes(geometry) < 0.15 * geometry.weights_bytes
    bound = 200e9 * 0.7 / footprint.token_read_bytes(geometry)
    assert 0.8 * bound < moe.rates[0] < bound  # the caches of one request are read, too


def test_a_repository_that_runs_as_it_is_comes_before_bits_that_must_be_made() -> None:
    models = fits_of(mac(64, bandwidth_gbps=800.0))
    # Eight bits would fit and be fast, but nobody published them.
    falcon = only(models["Falcon3-10B-Instruct"]).entry
    assert (falcon.bits, falcon.title) == (4, "mlx-community/Falcon3-10B-Instruct-4bit")
    # Originals that are small enough need no conversion.
    for name, bits in (
        ("SmolLM2-135M-Instruct", 16),
        ("Qwen3-Embedding-0.6B", 16),
        ("bge-small-en-v1.5", 32),
    ):
        entry = only(models[name]).entry
        assert (entry.bits, entry.title) == (bits, f"{entry.model.org}/{name}")
    # Experts that were published in MXFP4 stay so in every repository.
    gpt = only(models["gpt-oss-20b"]).entry
    assert (gpt.bits, gpt.repo) == (8, "mlx-community/gpt-oss-20b-MXFP4-Q8")
    assert gpt.facts.weight_bytes < 0.6 * gpt.facts.weights.parameters
    assert catalogue_fit.entry_tree(gpt)["packedExperts"] == "MXFP4"
    # Only what no repository that fits has is to be made.
    made = [
        fit.entry.title
        for model in models.values()
        if (fit := only(model)).refusal is None and not fit.entry.is_published
    ]
    assert made == ["BAAI/bge-m3 (convert)"]
    kimi = only(fits_of(mac(1536))["Kimi-K2.6"])
    assert (kimi.refusal, kimi.entry.title) == (None, "moonshotai/Kimi-K2.6 (quantize)")


def test_what_fits_comes_first_and_the_largest_of_it() -> None:
    models = list(fits_of(mac(24, bandwidth_gbps=120.0)).values())
    possible = [model.is_possible for model in models]
    assert possible == sorted(possible, reverse=True)
    sizes = [only(model).entry.facts.weights.parameters for model in models]
    count = sum(possible)
    assert sizes[:count] == sorted(sizes[:count], reverse=True)
    assert sizes[count:] == sorted(sizes[count:])
    refusal = only(models[-1]).refusal
    assert refusal is not None
    assert refusal.reason == "InsufficientMemory"


def test_equal_macs_are_one_kind_and_the_roomiest_answers() -> None:
    nodes = [mac(64, f"mac-{n}", chip="Apple M4 Max", used_bytes=n * GIB) for n in (3, 1, 2)]
    kinds = catalogue_fit.kinds_of([*nodes, mac(512, "big", chip="Apple M3 Ultra")])
    assert [kind.name for kind in kinds] == ["big", "3 x Apple M4 Max"]
    assert kinds[1].node.name == "mac-1"


def test_a_context_that_was_asked_for_is_required() -> None:
    fit = only(fits_of(mac(64), context_length=16_384)["OLMo-2-1124-7B-Instruct"])
    assert fit.refusal is not None
    assert fit.refusal.reason == "ContextTooLong"


def test_a_mac_of_a_size_has_the_rates_of_the_chips_that_were_sold_with_it() -> None:
    kind = catalogue_fit.kind_of_size(mac(16, "16Gi"))
    assert kind.bandwidths == (68.25, 200.0)
    assert catalogue_fit.kind_of_size(mac(20, "20Gi")).bandwidths == (0.0, 0.0)
