"""The shipped list of repositories: its form, and sizes that agree with published counts and with mlx-lm's own models."""

import pytest

from models.catalogue.catalogue import read_catalogue, search
from models.catalogue.dense_weights import GROUP_SIZE, quantized_tensors
from models.model_files import model_geometry
from reconciler.placement.memory_proof import prove
from tests.support.mlx_models import module

# Parameters as the model cards and the hub state them.
PUBLISHED = {
    "mlx-community/Llama-3.2-1B-Instruct-4bit": 1_235_814_400,
    "mlx-community/Llama-3.2-3B-Instruct-4bit": 3_212_749_824,
    "mlx-community/Llama-3.3-70B-Instruct-4bit": 70_553_706_496,
    "mlx-community/Meta-Llama-3.1-8B-Instruct-8bit": 8_030_261_248,
    "mlx-community/Qwen2.5-0.5B-Instruct-4bit": 494_032_768,
    "mlx-community/Qwen2.5-7B-Instruct-4bit": 7_615_616_512,
    "mlx-community/Qwen2.5-32B-Instruct-4bit": 32_763_876_352,
    "mlx-community/Qwen3-8B-4bit": 8_190_735_360,
}


def test_the_list_is_sorted_and_unique_and_uses_every_model() -> None:
    listed = read_catalogue()
    names = [repository.repo for repository in listed.repositories]
    assert names == sorted(set(names))
    assert {repository.base for repository in listed.repositories} == set(listed.models)


def test_the_memory_of_every_entry_is_proven() -> None:
    entries = search(())
    assert len(entries) == len(read_catalogue().repositories)
    for entry in entries:
        geometry = model_geometry(entry.facts, casts_to_float32=False)
        assert geometry.unknown == ""
        assert (
            prove(geometry, context_length=4096, concurrency=1).total_bytes > geometry.weights_bytes
        )


def test_parameters_are_those_that_were_published() -> None:
    found = {entry.repo: entry.facts.weights.parameters for entry in search(())}
    assert {repo: found[repo] for repo in PUBLISHED} == PUBLISHED


def test_every_word_must_match() -> None:
    assert {entry.bits for entry in search(("QWEN3", "4bit"))} == {4}
    assert (
        next(entry.repo for entry in search(("qwen3", "4bit"))) == "mlx-community/Qwen3-0.6B-4bit"
    )
    assert search(("qwen3", "llama3.2")) == ()


@pytest.mark.mlx
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tensors_are_those_of_the_model_that_mlx_lm_builds(family: str) -> None:
    nn, utils = module("mlx.nn"), module("mlx.utils")
    entry = next(
        catalogue_entry
        for catalogue_entry in search((family,))
        if catalogue_entry.config.model_type == family
    )
    small = entry.config.model_copy(update={"num_hidden_layers": 2, "vocab_size": 512})
    built = module(f"mlx_lm.models.{family}")
    rest = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
    model = built.Model(built.ModelArgs.from_dict({**small.model_dump(), **rest}))
    model.set_dtype(module("mlx.core").bfloat16)
    nn.quantize(model, group_size=GROUP_SIZE, bits=entry.bits)
    sizes = {name: array.nbytes for name, array in utils.tree_flatten(model.parameters())}
    expected = quantized_tensors(small, entry.bits)
    assert {name: one.size for name, one in expected.items()} == sizes
