"""Draft models of the tiny model: loaded with it, or refused with a reason."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.gauges import Gauges
from models import model_files
from models.model_files import ModelUnusableError
from schemas.wire.engine_config import EngineConfig
from tests.support.engine_adapters import PROMPT, load_adapted, logits
from tests.support.engine_process import Start, eventually
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


def config_of(folder: Path, draft: Path, *, context: int = 1024) -> EngineConfig:
    return EngineConfig(model_dir=folder, draft_model=draft, context_length=context, concurrency=2)


def drafted(folder: Path, draft: Path, *, context: int = 1024, gauges: Gauges | None = None) -> Any:
    gauges = gauges or Gauges()
    return module("engine.model.draft_model").add_draft(
        load_adapted(folder, gauges=gauges),
        config_of(folder, draft, context=context),
        gauges,
        is_stopping=lambda: False,
    )


def test_a_draft_model_is_loaded_with_the_model(tiny: Path, other: Path) -> None:
    gauges = Gauges()
    found = drafted(tiny, other, gauges=gauges)
    assert len(found.draft.layers) == 1
    assert logits(found.draft).shape == logits(found.model).shape
    weights = sum(model_files.inspect_model(folder).weight_bytes for folder in (tiny, other))
    assert gauges.loaded_bytes == gauges.total_bytes == weights
    assert load_adapted(tiny).draft is None


@pytest.mark.ci
@pytest.mark.parametrize(
    ("changes", "damage", "message"),
    [
        ({"vocab": 400}, None, "cannot be the draft model: it has 400 tokens, the model has 512, and .* small model of the same"),
        ({"has_markers": False}, None, "cannot be the draft model: .*of the model's tokens differ, first "),
        ({"context": 512}, None, "context length 1024 is more than"),
        ({}, lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
        ({}, lambda f: (f / "model.safetensors").write_bytes(b"x"), "is not a safetensors file"),
        ({}, shutil.rmtree, "does not exist"),
    ],
)  # fmt: skip
def test_an_unusable_draft_model_is_refused(
    tiny: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    damage: Callable[[Path], object] | None,
    message: str,
) -> None:
    folder = module("tests.support.tiny_model").make(tmp_path / "small", **changes)
    if damage is not None:
        damage(folder)
    with pytest.raises(ModelUnusableError, match=message):
        drafted(tiny, folder)


@pytest.mark.ci
def test_an_engine_serves_with_both(tiny: Path, adapter: Path, other: Path, start: Start) -> None:
    """Check flags, loader and answers together; the text is that of mlx-lm."""
    engine = start(tiny, adapter=adapter, draft_model=other, context_length=1024)
    eventually(engine.is_ready, within_s=60)
    reply = engine.post("/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0)
    found = reply.json["choices"][0]["text"]
    model, tokenizer = module("mlx_lm").load(str(tiny), adapter_path=str(adapter))
    assert found == module("mlx_lm").generate(model, tokenizer, PROMPT, max_tokens=12)
