"""A real model through GGUF and back: SmolLM2 answers as before, and eight bits stay near."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from models.gguf import conversion
from tests.support.gguf_files import write_gguf
from tests.support.mlx_models import module
from tests.support.models import MODEL

pytestmark = [pytest.mark.ci, pytest.mark.mlx, pytest.mark.timeout(900)]

DOCS = Path(__file__).parents[3] / "docs"
QUESTION = "<|im_start|>user\nName three planets.<|im_end|>\n<|im_start|>assistant\n"


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return the likeliest tokens after the prompt, one after another."""
    mx, caches = module("mlx.core"), module("mlx_lm.models.cache")
    cache, given, answer = caches.make_prompt_cache(model), tokens, []
    for _ in range(count):
        answer.append(mx.argmax(model(mx.array([given]), cache=cache)[0, -1]).item())
        given = answer[-1:]
    return answer


@pytest.mark.parametrize(("packing", "limit"), [("F16", 0.01), ("Q8_0", 0.2)])
def test_answers_are_those_of_the_original(
    smollm2: Path, tmp_path: Path, packing: str, limit: float
) -> None:
    mx, utils = module("mlx.core"), module("mlx_lm.utils")
    pre: dict[str, Any] = {"tokenizer__ggml__pre": "smollm"}
    path = write_gguf(tmp_path / "smol.gguf", smollm2 / MODEL, packing, **pre)
    conversion.convert(path, tmp_path / "out")
    before, after = (
        Tokenizer.from_file(str(folder / "tokenizer.json"))
        for folder in (smollm2 / MODEL, tmp_path / "out")
    )
    text = "".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    ids = before.encode(text).ids
    assert len(ids) > 30_000
    assert after.encode(text).ids == ids
    original, _ = utils.load_model(smollm2 / MODEL)
    model, _ = utils.load_model(tmp_path / "out")
    model.set_dtype(mx.float32)  # the difference of the weights, not of the arithmetic
    tokens = mx.array([ids[:128]])
    first, second = original(tokens), model(tokens)
    assert mx.abs(first - second).mean().item() < limit
    assert mx.mean(mx.argmax(first, -1) == mx.argmax(second, -1)).item() > 0.95
    prompt, count = before.encode(QUESTION).ids, 16 if packing == "F16" else 4
    assert greedy(model, prompt, count) == greedy(original, prompt, count)
