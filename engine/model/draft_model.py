"""The draft model: a small model that proposes tokens for speculative decoding. Worker thread only."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from engine.gauges import Gauges
from engine.model.loader import LoadedModel, Model, load_codec, materialize, raise_unusable
from models import model_files
from models.model_files import ModelUnusableError
from schemas.wire.engine_config import EngineConfig

log = logging.getLogger(__name__)


def add_draft(
    loaded: LoadedModel, config: EngineConfig, gauges: Gauges, *, is_stopping: Callable[[], bool]
) -> LoadedModel:
    """Return the loaded model with the draft model of the config; unchanged if the config names none.

    Raises:
        ModelUnusableError: the folder is no valid model, or its model cannot be the draft for this one.
        StoppedError: `is_stopping` became true.

    """
    folder = config.draft_model
    if folder is None:
        return loaded
    if not loaded.has_head:
        raise ModelUnusableError("a draft model needs a model that generates text; leave it out")
    if folder.resolve() == config.model_dir.resolve():
        raise ModelUnusableError(
            f"{folder} is the model itself, and as its own draft it would only double the work; use a small model of the same family"
        )
    facts = model_files.inspect_model(folder)
    model_files.check_context(facts, config.context_length)
    with raise_unusable(folder):
        model, found = load_model(folder, lazy=True, trust_remote_code=False)
    codec = load_codec(folder, found)
    _check_vocabulary(folder, codec.vocabulary, loaded.codec.vocabulary)
    check_guesses(loaded, config.model_dir, "spec.model.draft")
    _check_caches(folder, model, "spec.model.draft")
    materialize(model, gauges, is_stopping=is_stopping)
    log.info("draft model loaded", extra={"bytes": facts.weight_bytes})
    return replace(loaded, draft=model)


def check_guesses(loaded: LoadedModel, folder: Path, flag: str) -> None:
    """Refuse a model that generates no text, or cannot drop a token that was guessed wrong.

    Raises:
        ModelUnusableError: it is such a model; names the flag and the layers.

    """
    if not loaded.has_head:
        raise ModelUnusableError(f"{flag} needs a model that generates text; leave it out")
    _check_caches(folder, loaded.model, flag)


def _check_vocabulary(folder: Path, own: Mapping[str, int], vocabulary: Mapping[str, int]) -> None:
    """Refuse a vocabulary in which the same tokens spell other texts."""
    if own == vocabulary:
        return
    differ = [text for text in vocabulary if own.get(text) != vocabulary[text]]
    shown = f", first {differ[0]!r}" if differ else ""
    raise ModelUnusableError(
        f"{folder} cannot be the draft model: it has {len(own)} tokens, the model has {len(vocabulary)}, and "
        f"{len(differ)} of the model's tokens differ{shown}; use a small model of the same family"
    )


def _check_caches(folder: Path, model: Model, flag: str) -> None:
    """Refuse layers whose caches cannot drop a rejected token."""
    caches: list[Any] = make_prompt_cache(model)
    others = sorted({type(cache).__name__ for cache in caches if type(cache) is not KVCache})
    if others:
        raise ModelUnusableError(
            f"{folder} has layers that cannot drop a rejected token ({', '.join(others)}), so it cannot be used with "
            f"{flag}; leave it out"
        )
