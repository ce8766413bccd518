"""Recommended sampling values: read, checked one by one, and overruled by the deployment."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.generation_config import fill_in, recommended_sampling
from schemas.sampling import Sampling

QWEN = {
    "bos_token_id": 151643, "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
    "transformers_version": "4.37.0",
}  # fmt: skip


def folder_with(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_the_values_of_a_published_model(tmp_path: Path) -> None:
    assert recommended_sampling(folder_with(tmp_path, QWEN)) == Sampling(
        temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05
    )


def test_a_deployment_wins(tmp_path: Path) -> None:
    own = Sampling(temperature=0.0, max_tokens=5)
    assert fill_in(own, folder_with(tmp_path, QWEN)) == Sampling(
        temperature=0.0, max_tokens=5, top_p=0.8, top_k=20, repetition_penalty=1.05
    )


@pytest.mark.parametrize("content", [
    *("{", "[]", '{"temperature": 1e999}', '{"temperature": NaN}', "x" * (2 << 20), "\x00"),
    {"temperature": "hot"}, {"temperature": -1}, {"top_k": 1.5}, {"top_k": True},
    {"top_p": {"a": 1}}, {"repetition_penalty": 0}, {"max_new_tokens": 2048},
], ids=lambda content: str(content)[:20])  # fmt: skip
def test_what_no_request_could_have_is_left_out(tmp_path: Path, content: Any) -> None:
    assert recommended_sampling(folder_with(tmp_path, content)) == Sampling()


def test_one_wrong_value_costs_no_other(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, QWEN | {"temperature": 9})
    assert recommended_sampling(folder) == Sampling(top_p=0.8, top_k=20, repetition_penalty=1.05)


def test_a_model_without_the_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").mkdir()
    assert recommended_sampling(tmp_path) == Sampling()
    assert recommended_sampling(tmp_path / "none") == Sampling()
