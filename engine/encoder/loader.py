"""Loads an encoder from its folder, and divides the memory. Worker thread only; imports mlx."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.batch.text_queue import QueuedText
from engine.encoder.loop import EncoderLoop
from engine.encoder.transformer import Encoder, EncoderConfig, canonical_weights
from engine.gauges import Gauges
from engine.memory import allocation
from engine.model import loader, pooler
from engine.ports import ServedModel
from machinery.clock import Clock
from models import encoder_shape
from models.hf_config import ModelConfig
from models.model_files import ModelFacts, ModelUnusableError, parse_json_file
from schemas.wire.engine_config import EngineConfig

log = logging.getLogger(__name__)


def load(
    config: EngineConfig,
    facts: ModelFacts,
    gauges: Gauges,
    *,
    clock: Clock,
    is_stopping: Callable[[], bool],
) -> tuple[EncoderLoop, ServedModel]:
    """Load the encoder of the config; return its loop, and what the event loop must know.

    Raises:
        ModelUnusableError: nothing here computes it, the memory is too small, or the config asks for what it cannot do.
        StoppedError: `is_stopping` became true.

    """
    folder, shape = config.model_dir, facts.encoder
    assert shape is not None
    allocation.refuse_text_settings(config, f"an encoder ({facts.model_type})")
    pooling = pooler.read_config(folder, facts)
    if pooling is None:
        raise ModelUnusableError(
            f"{folder}: an encoder needs sentence-transformers' modules.json and 1_Pooling/config.json, which say how a "
            "text becomes one vector, or an architecture ...ForSequenceClassification; copy them from the original model"
        )
    encoder = _build(folder, is_classifier=pooling.score is not None)
    loader.materialize(encoder, gauges, is_stopping=is_stopping)
    codec = loader.load_codec(folder, {})
    allocation.divide_for_work(config, shape.work_bytes, gauges)
    runner = EncoderLoop(
        encoder=encoder,
        pooling=pooling,
        batch_tokens=shape.batch_tokens,
        gauges=gauges,
        clock=clock,
    )
    with loader.raise_unusable(f"{folder}: config.json and the weights make no encoder"):
        runner.encode([QueuedText(0, 0, (0, 1), 0)])
    log.info("model loaded", extra={"bytes": gauges.loaded_bytes, "task": shape.task})
    return runner, ServedModel(
        codec=codec,
        vocab_size=facts.vocab_size or codec.size,
        pooling=pooling,
        has_head=False,
    )


def _build(folder: Path, *, is_classifier: bool) -> Encoder:
    """Return the encoder of a folder, whose weights are read later."""
    settings = parse_json_file(EncoderConfig, folder / "config.json")
    unsupported = settings.unsupported()
    if unsupported:
        raise ModelUnusableError(f"{folder}/config.json: {unsupported} is not supported")
    offset = encoder_shape.position_offset(parse_json_file(ModelConfig, folder / "config.json"))
    with loader.raise_unusable(f"{folder}: config.json and the weights make no encoder"):
        tensors: dict[str, Any] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            part: Any = mx.load(str(path))
            tensors |= part
        weights = canonical_weights(tensors, settings, is_classifier=is_classifier)
        return Encoder(settings, weights, position_offset=offset)
