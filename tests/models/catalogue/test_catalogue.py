"""The catalogue: its form, and figures that agree with published totals, with repositories, and with mlx-lm's own models."""

import json
import re

import pytest

from engine.text.formats import registry
from models import encoder_shape
from models.catalogue import catalogue
from models.catalogue.catalogue import CatalogueError, parse_catalogue, shipped_catalogue
from models.model_files import model_geometry
from reconciler.placement.memory_proof import prove
from schemas.deployment import HUB_REPO_PATTERN
from tests.support.mlx_models import module

SHIPPED = shipped_catalogue()
ENTRIES = tuple(catalogue.entries(SHIPPED))

# Parameters as the model cards and the hub state them.
EXACT = {
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Meta-Llama-3.1-8B-Instruct": 8_030_261_248,
    "Mistral-Small-3.1-24B-Instruct-2503": 24_011_361_280,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen3-VL-32B-Instruct": 33_357_390_064,
    "Qwen3.5-4B": 4_539_265_536,
    "all-MiniLM-L6-v2": 22_713_216,
    "gemma-3-4b-it": 4_300_079_472,
    "gemma-3-12b-it": 12_187_325_040,
    "gemma-3-27b-it": 27_432_406_640,
}
# Totals of model cards in billions, where the name rounds too much or counts something else.
PUBLISHED = {
    "DeepSeek-V3": 671, "DeepSeek-R1": 671, "DeepSeek-V3.1": 671, "DeepSeek-V3.2": 671, "Kimi-K2-Instruct": 1000,
    "GLM-4.5": 355, "GLM-4.5-Air": 106, "GLM-4.7-Flash": 30, "GLM-5": 744, "MiniMax-M2": 230, "phi-4": 14.7,
    "ERNIE-4.5-0.3B-PT": 0.36, "Llama-3.2-1B-Instruct": 1.24, "Llama-3.2-3B-Instruct": 3.21,
    "Mixtral-8x7B-Instruct-v0.1": 46.7, "Mixtral-8x22B-Instruct-v0.1": 141, "Qwen2.5-7B-Instruct": 7.61,
    "Qwen2.5-Coder-7B-Instruct": 7.61, "Qwen2.5-14B-Instruct": 14.7, "Qwen3-14B": 14.8, "OLMo-2-1124-13B-Instruct": 13.7,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6, "gemma-4-E2B-it": 5.1, "gemma-4-E4B-it": 8, "Mistral-Large-Instruct-2411": 123,
    "Ministral-3-8B-Instruct-2512": 8.8, "granite-4.0-h-small": 32, "granite-4.0-h-tiny": 7, "whisper-tiny": 0.039, "whisper-base": 0.074, "whisper-small": 0.244, "whisper-medium": 0.769,
    "all-MiniLM-L6-v2": 0.0227, "bge-small-en-v1.5": 0.0334, "bge-base-en-v1.5": 0.109, "bge-large-en-v1.5": 0.335,
    "bge-m3": 0.568, "multilingual-e5-large": 0.56, "gte-modernbert-base": 0.149, "nomic-embed-text-v1.5": 0.137,
    "bge-reranker-v2-m3": 0.568, "ms-marco-MiniLM-L6-v2": 0.0227,
    "whisper-large-v3": 1.55, "whisper-large-v3-turbo": 0.809, "Falcon3-7B-Instruct": 7.46,
}  # fmt: skip
# A name that counts neither the towers nor the tables of layers.
NOT_COMPARED = ("gemma-3n-E4B-it",)
# Active parameters in billions, as the names say them.
ACTIVE = re.compile(r"-A(\d+)B")
NAMED = re.compile(r"(?:^|-)(\d+(?:\.\d+)?)([BbM])(?=-|$)")
# Bytes of repositories, as exo's model cards and lists of the hub's files have them.
REPOSITORIES = {
    "BAAI/bge-large-en-v1.5": 1_340_616_616,
    "BAAI/bge-reranker-v2-m3": 2_271_071_852,
    "BAAI/bge-small-en-v1.5": 133_466_304,
    "mlx-community/DeepSeek-V3.2-4bit": 378_086_226_621,
    "mlx-community/MiniMax-M2.5-8bit": 242_986_745_856,
    "mlx-community/NVIDIA-Nemotron-3-Nano-30B-A3B-MLX-4Bit": 17_775_342_336,
    "mlx-community/Qwen3.5-27B-4bit": 16_054_266_848,
    "mlx-community/Qwen3.5-397B-A17B-4bit": 223_860_768_352,
    "mlx-community/Qwen3.6-35B-A3B-4bit": 20_401_929_952,
    "mlx-community/gemma-4-31b-it-4bit": 18_411_755_224,
    "mlx-community/gemma-4-e2b-it-4bit": 3_580_765_126,
    "mlx-community/gpt-oss-120b-MXFP4-Q8": 63_414_972_073,
    "mlx-community/gpt-oss-20b-MXFP4-Q8": 12_025_908_224,
    "nomic-ai/nomic-embed-text-v1.5": 546_938_168,
}
# With tokenizers, which take up to 38 MB, as Rapid-MLX's list and others of the hub's files have them.
DOWNLOADS = {
    "mlx-community/Ministral-3-8B-Instruct-2512-4bit": 5_630_652_158,
    "mlx-community/Mistral-Small-3.1-24B-Instruct-2503-4bit": 14_119_055_427,
    "mlx-community/Qwen3-VL-2B-Instruct-4bit": 1_798_016_313,
    "mlx-community/Qwen3-VL-4B-Instruct-4bit": 3_109_724_637,
    "mlx-community/Qwen3-VL-8B-Instruct-4bit": 5_776_625_617,
    "mlx-community/Qwen3-VL-30B-A3B-Instruct-4bit": 18_268_077_278,
    "mlx-community/Qwen3-VL-32B-Instruct-4bit": 19_636_446_591,
    "mlx-community/Qwen3.5-4B-8bit": 5_163_516_733,
    "mlx-community/gemma-3-27b-it-4bit": 16_873_382_186,
    "mlx-community/gemma-3n-E4B-it-4bit": 5_860_000_000,
}
TOKENIZER_BYTES = 38_000_000
# bge-m3 has PyTorch's .bin only, DeepSeek-R1-4bit groups of 32, and no text was found that names a conversion of Kimi-K2.6.
WITHOUT_REPOSITORY = {"DeepSeek-R1", "Kimi-K2.6", "bge-m3"}
# How the name of a repository says its bits; that of an original, or of one that is as the original, says none.
BITS_IN_NAMES = {
    "4": r"4-?bits?|-q4\b", "8": r"8bit|-q8\b", "16": r"fp16$|bf16$|^{name}$", "32": r"^{name}$",
}  # fmt: skip


def test_the_catalogue_has_current_models_with_their_sources() -> None:
    assert len(SHIPPED.models) >= 100
    assert list(SHIPPED.models) == sorted(SHIPPED.models)
    for name, model in SHIPPED.models.items():
        assert model.source, name
        assert model.format in ("", "plain", *(each.name for each in registry.FORMATS)), name
    names = [entry.repo for entry in ENTRIES if entry.is_published]
    assert len(names) == len(set(names))
    runnable = {entry.name for entry in ENTRIES if entry.is_published}
    assert set(SHIPPED.models) - runnable == WITHOUT_REPOSITORY


def test_the_name_of_a_repository_has_the_model_and_its_bits() -> None:
    for name, model in SHIPPED.models.items():
        for bits, repo in model.repositories.items():
            assert re.fullmatch(HUB_REPO_PATTERN, repo)
            stem, own = name.lower().removesuffix("-bf16"), repo.partition("/")[2].lower()
            assert stem in own, repo
            assert re.search(BITS_IN_NAMES[bits].format(name=re.escape(stem)), own), repo
            entry = catalogue.find(repo, SHIPPED)
            assert entry is not None, repo
            assert (entry.name, entry.bits, entry.title) == (name, int(bits), repo)


def test_what_no_repository_has_is_the_original_with_a_remedy() -> None:
    titles = {entry.title for entry in ENTRIES if not entry.is_published}
    assert {"moonshotai/Kimi-K2.6 (quantize)", "BAAI/bge-m3 (convert)"} <= titles
    assert catalogue.find("BAAI/bge-m3", SHIPPED) is None


def test_the_memory_of_every_entry_is_proven() -> None:
    for entry in ENTRIES:
        geometry = model_geometry(entry.facts, casts_to_float32=False)
        assert geometry.unknown == "", entry.repo
        need = prove(geometry, context_length=4096, concurrency=1).total_bytes
        assert need > geometry.weights_bytes > geometry.replicated_bytes, entry.repo
        # A model that is served whole has no caches; an encoder's texts have its own limit.
        is_whole = entry.facts.speech is not None or entry.facts.encoder is not None
        assert is_whole != bool(geometry.max_context and geometry.replicated_bytes), entry.repo
        assert entry.facts.encoder is None or entry.facts.encoder.task == entry.model.task
        assert (geometry.expert_bytes > 0) == (geometry.experts > geometry.experts_of_token > 0), (
            entry.repo
        )


def _published_total(name: str) -> float | None:
    """Return the published number of parameters: that of the card, else the one in the name."""
    match = None if name in NOT_COMPARED else NAMED.search(name)
    if name in EXACT:
        return EXACT[name]
    if name in PUBLISHED:
        return PUBLISHED[name] * 1e9
    return float(match[1]) * (1e6 if match[2] == "M" else 1e9) if match else None


def test_parameters_are_those_that_were_published() -> None:
    totals = {name: _total(name) for name in SHIPPED.models}
    assert {name: totals[name] for name in EXACT} == EXACT
    compared = {name: _published_total(name) for name in totals}
    wrong = {
        name: (totals[name], published)
        for name, published in compared.items()
        if published is not None and abs(totals[name] / published - 1) > 0.05
    }
    assert not wrong
    assert sum(published is not None for published in compared.values()) >= 90


def _total(name: str) -> int:
    model = SHIPPED.models[name]
    # The conversions of Gemma 3 have the table of tokens a second time, as the head.
    repeated = model.weights.looked_up if model.config["model_type"] == "gemma3" else 0
    return model.weights.packed + model.weights.plain + model.towers - repeated


def test_active_parameters_are_those_of_the_names() -> None:
    named = {
        entry.repo: (entry.active_parameters / 1e9, float(match[1]))
        for entry in ENTRIES
        if (match := ACTIVE.search(entry.repo))
    }
    assert len(named) >= 20
    # Cards round to whole billions, and some leave embeddings out.
    wrong = {
        repo: pair
        for repo, pair in named.items()
        if abs(pair[0] - pair[1]) > max(1.0, 0.1 * pair[1])
    }
    assert not wrong


def test_sizes_are_those_of_the_repositories() -> None:
    sizes = {entry.repo: entry.facts.weight_bytes for entry in ENTRIES if entry.is_published}
    for repo, published in REPOSITORIES.items():
        assert sizes[repo] == pytest.approx(published, rel=0.005), repo
    for repo, published in DOWNLOADS.items():
        assert 0.995 * published - TOKENIZER_BYTES <= sizes[repo] <= 1.005 * published, repo


def test_towers_are_counted_where_a_repository_has_them() -> None:
    for name, model in SHIPPED.models.items():
        if model.task == "Generate":
            assert bool(model.towers) == (model.inputs != ("Text",)), name
    entries = {entry.title: entry.facts.weights for entry in ENTRIES}
    text_only = entries["google/gemma-3n-E4B-it (quantize)"].parameters
    whole = entries["mlx-community/gemma-3n-E4B-it-4bit"]
    assert whole.parameters - text_only == SHIPPED.models["gemma-3n-E4B-it"].towers


def test_every_word_must_match() -> None:
    found = catalogue.search(("QWEN3-", "4bit", "apache"), SHIPPED)
    assert {entry.bits for entry in found} == {4}
    assert found[0].repo in ("mlx-community/Qwen3-0.6B-4bit", "Qwen/Qwen3-Embedding-0.6B")
    assert {entry.model.task for entry in catalogue.search(("embed",), SHIPPED)} == {"Embed"}
    assert catalogue.search(("qwen3", "llama3.2"), SHIPPED) == ()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"[]", "content"),
        (b'{"date": "2026-01-01", "models": {"a/b": {}}}', "models"),
        (b" " * (catalogue.MAX_CATALOGUE_BYTES + 1), "bytes"),
        (b"[" + b"0," * 200_001 + b"0]", "values"),
    ],
)
def test_a_catalogue_that_is_none_is_refused_with_the_reason(raw: bytes, why: str) -> None:
    with pytest.raises(CatalogueError, match=why):
        parse_catalogue(raw)


def _whisper_total(config: dict[str, int]) -> int:
    """Return the parameters of whisper by hand; equal to those of mlx-audio's class, which needs a package of its own."""
    width, encoder, decoder = (
        config["d_model"], config["encoder_layers"], config["decoder_layers"]
    )  # fmt: skip
    attention = 4 * width * width + 3 * width  # keys have no bias
    feed_forward, norm = 8 * width * width + 5 * width, 2 * width
    layers = encoder * (attention + feed_forward + 2 * norm)
    layers += decoder * (2 * attention + feed_forward + 3 * norm)
    convolutions = 3 * width * (config["num_mel_bins"] + width) + 2 * width
    tables = (config["vocab_size"] + config["max_target_positions"]) * width
    return layers + convolutions + tables + 2 * norm


@pytest.mark.mlx
@pytest.mark.ci
def test_parameters_are_those_of_the_models_that_mlx_lm_builds() -> None:
    count = module("engine.catalogue_weights").count_weights
    for name, model in SHIPPED.models.items():
        if model.task == "Transcribe":
            assert _whisper_total(model.config) == _total(name), name
            continue
        if model.config["model_type"] in encoder_shape.FAMILIES:
            continue  # built by engine/encoder; their published totals are compared above
        counts = json.loads(model.weights.model_dump_json(by_alias=True))
        assert count(model.config) == counts, name
