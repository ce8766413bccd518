"""Loads a model of mlx-audio from its folder, and divides the memory. Worker thread only; imports mlx."""

import importlib.metadata
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_audio import utils

from engine.errors import summarize
from engine.gauges import Gauges
from engine.memory import allocation, budget
from engine.memory.budget import MemoryRequest
from engine.ports import ServedSpeech
from engine.speech import voice
from engine.speech.loop import SpeechLoop
from engine.speech.voice import VoiceSynthesizer
from engine.speech.whisper import WhisperTranscriber
from models.footprint import KvFootprint, ServingLoad
from models.model_files import ModelFacts, ModelUnusableError
from models.speech_shape import SpeechShape
from schemas.kv_cache import KvCache
from schemas.wire.engine_config import EngineConfig

log = logging.getLogger(__name__)


def load(
    config: EngineConfig, facts: ModelFacts, gauges: Gauges
) -> tuple[SpeechLoop, ServedSpeech]:
    """Load the speech model of the config; return its loop, and what the event loop must know.

    Raises:
        ModelUnusableError: mlx-audio cannot load it, the memory is too small, or the config asks for what it cannot do.

    """
    shape = facts.speech
    assert shape is not None
    _check_config(config, facts.model_type)
    family, folder = shape.family, config.model_dir
    voices = voice.voice_names(folder, family) if family.task == "Speak" else ()
    model = _load_model(folder, shape)
    gauges.loaded_bytes = gauges.total_bytes
    _divide_memory(config, shape, gauges)
    log.info(
        "model loaded",
        extra={
            "bytes": mx.get_active_memory(),
            "mlx_audio": importlib.metadata.version("mlx-audio"),
        },
    )
    if family.task == "Speak":
        loop = SpeechLoop(start=VoiceSynthesizer(model).run, gauges=gauges)
        return loop, ServedSpeech(task="Speak", voices=voices)
    transcriber = WhisperTranscriber(model)
    served = ServedSpeech(
        task="Transcribe",
        languages=transcriber.languages,
        can_translate=transcriber.can_translate,
    )
    return SpeechLoop(start=transcriber.run, gauges=gauges), served


def _check_config(config: EngineConfig, model_type: str) -> None:
    """Refuse settings of text models: they would have no effect."""
    given = {
        "a draft model": config.draft_model,
        "n-grams": config.ngram_tokens,
        "an MTP head": config.mtp_tokens,
        "adapters": config.adapter or config.adapters,
        "vision": config.vision,
        "pinned prefixes": config.prefixes,
        "a group of ranks": config.group,
        "kvCache": config.kv_cache != KvCache(),
    }
    named = [name for name, value in given.items() if value]
    if named:
        raise ModelUnusableError(
            f"{config.model_dir}: a speech model ({model_type}) has no use for {' and '.join(named)}; remove it"
        )


def _load_model(folder: Path, shape: SpeechShape) -> Any:
    category = shape.family.package.partition("/")[0]
    name = shape.family.package.rpartition("/")[2]
    try:
        with warnings.catch_warnings():
            # A tokenizer that cannot be read is a warning there, and an error of each request.
            warnings.filterwarnings("error", message="Could not load WhisperProcessor")
            model = utils.base_load_model(
                folder, category, {}, strict=True, model_type=name, model_name_parts=[name]
            )
    except ModuleNotFoundError as error:
        raise ModelUnusableError(
            f"{folder}: mlx-audio lacks {error.name}", reason="MlxAudioMissing"
        ) from error
    except Exception as error:
        # Whatever the files make of mlx-audio: a restart does not help.
        raise ModelUnusableError(
            f"{folder}: config.json and the weights make no speech model: {summarize(error)}"
        ) from error
    if sys.platform == "linux":
        _widen(model)
    return model


def _widen(model: Any) -> None:
    """Compute in float32: MLX's CPU backend is many times slower with 16 bits."""
    half = (mx.float16, mx.bfloat16)
    model.update(
        tree_map(lambda a: a.astype(mx.float32) if a.dtype in half else a, model.parameters())
    )
    if hasattr(model, "dims"):  # whisper casts its input
        model.dtype = mx.float32
    mx.eval(model.parameters())


def _divide_memory(config: EngineConfig, shape: SpeechShape, gauges: Gauges) -> None:
    """Set MLX's limits: all memory beside the weights is for the window or the sentence at hand."""
    shared = budget.make_budget(
        KvFootprint(),
        ServingLoad(context_length=config.context_length, concurrency=config.concurrency),
        MemoryRequest(promised_bytes=config.memory_limit_bytes, prefix_bytes=0),
        machine_bytes=allocation.machine_bytes(),
        held=(mx.get_active_memory(), shape.work_bytes),
    )
    gauges.limit_bytes = shared.limit_bytes
    free = shared.limit_bytes - shared.weights_bytes
    if free < shape.work_bytes:
        raise ModelUnusableError(
            f"the limit of {shared.limit_bytes >> 20} MiB leaves {max(0, free) >> 20} MiB beside the weights; "
            f"this model needs {shape.work_bytes >> 20} MiB for its work: set spec.resources.memory higher"
        )
    allocation.apply_limits(allocation.find_limits(shared, config.wired))
