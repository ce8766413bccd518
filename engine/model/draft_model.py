"""The draft model: a small one that guesses what the model then checks. In the worker's thread alone."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from engine.config import EngineConfig
from engine.gauges import Gauges
from engine.model.loader import LoadedModel, Model, load_codec, materialize, raise_unusable
from models import model_files
from models.model_files import ModelUnusableError

log = logging.getLogger(__name__)


def add_draft(
    loaded: LoadedModel, config: EngineConfig, gauges: Gauges, *, is_stopping: Callable[[], bool]
) -> LoadedModel:
    """Return the loaded model with the draft model that the config names; as it is if it names none.

    Raises:
        ModelUnusableError: the folder is no sound model, or it cannot guess for this one.
        StoppedError: `is_stopping` became true.

    """
    folder = config.draft_model
    if folder is None:
        return loaded
    if not loaded.has_head:
        raise ModelUnusableError("a draft model needs a model that generates text; leave it out")
    if folder.resolve() == config.model_dir.resolve():
        raise ModelUnusableError(
            f"{folder} is the model itself; as its own draft it would only do everything twice: take a small model of the same family"
        )
    facts = model_files.inspect_model(folder)
    model_files.check_context(facts, config.context_length)
    with raise_unusable(folder):
        model, found = load_model(folder, lazy=True)
    codec = load_codec(folder, found)
    _check_vocabulary(folder, codec.vocabulary, loaded.codec.vocabulary)
    _check_caches(config.model_dir, loaded.model)
    _check_caches(folder, model)
    materialize(model, gauges, is_stopping=is_stopping)
    log.info("draft model loaded", extra={"bytes": facts.weight_bytes})
    return replace(loaded, draft=model)


def _check_vocabulary(folder: Path, own: Mapping[str, int], wanted: Mapping[str, int]) -> None:
    """Refuse a vocabulary in which the guesses would be other words, or none at all."""
    if own == wanted:
        return
    differ = [text for text in wanted if own.get(text) != wanted[text]]
    shown = f", first {differ[0]!r}" if differ else ""
    raise ModelUnusableError(
        f"{folder} cannot be the draft model: it knows {len(own)} tokens, the model {len(wanted)}, and "
        f"{len(differ)} of the model's are not the same there{shown}; take a small model of the same family"
    )


def _check_caches(folder: Path, model: Model) -> None:
    """Refuse layers from which a wrong guess cannot be taken back."""
    caches: list[Any] = make_prompt_cache(model)
    others = sorted({type(cache).__name__ for cache in caches if type(cache) is not KVCache})
    if others:
        raise ModelUnusableError(
            f"{folder} has layers that cannot take back a wrong guess ({', '.join(others)}), so there can be no "
            "draft model; leave it out"
        )
