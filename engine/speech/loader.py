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
from engine.memory import allocation
from engine.ports import ServedSpeech
from engine.speech import voice
from engine.speech.loop import SpeechLoop
from engine.speech.voice import VoiceSynthesizer
from engine.speech.whisper import WhisperTranscriber
from models.model_files import ModelFacts, ModelUnusableError
from models.speech_shape import SpeechShape
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
    allocation.refuse_text_settings(config, f"a speech model ({facts.model_type})")
    family, folder = shape.family, config.model_dir
    voices = voice.voice_names(folder, family) if family.task == "Speak" else ()
    model = _load_model(folder, shape)
    gauges.loaded_bytes = gauges.total_bytes
    allocation.divide_for_work(config, shape.work_bytes, gauges)
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
