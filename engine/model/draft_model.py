"""The draft model: a small model that proposes tokens for speculative decoding. Worker thread only."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from mlx_lm.utils import load_model

from engine.gauges import Gauges
from engine.model.loader import LoadedModel, load_codec, materialize, raise_unusable
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
    check_guesses(loaded, "spec.model.draft")
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
    materialize(model, gauges, is_stopping=is_stopping)
    log.info("draft model loaded", extra={"bytes": facts.weight_bytes})
    return replace(loaded, draft=model)


def check_guesses(loaded: LoadedModel, flag: str) -> None:
    """Refuse a model that generates no text.

    Raises:
        ModelUnusableError: it is such a model; names the flag.

    """
    if not loaded.has_head:
        raise ModelUnusableError(f"{flag} needs a model that generates text; leave it out")


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
