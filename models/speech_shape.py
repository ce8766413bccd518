"""Speech models: which folders are transcribers or voices, and the memory that a piece of work of each takes. Pure.

mlx-audio has a class for many more families than `FAMILIES`. Only these were tried with the whole engine.
"""

from dataclasses import dataclass
from typing import Final

from models.hf_config import ModelConfig
from schemas.wire.audio_limits import DECODING_BYTES, UPLOAD_BYTES, UPLOADS, SpeechTask

WINDOW_S: Final = 30
"""Seconds of audio that a transcriber hears at once (whisper's window)."""
_MEL_FRAMES_PER_S: Final = 100
# Arrays of a frame's width, of its feed-forward part and of its scores that are alive at once in a layer of the encoder.
_HIDDEN_COPIES, _FFN_COPIES, _SCORE_COPIES = 6, 4, 3
# A voice makes one sentence at a time. A bound that nobody has measured with real weights: its caches and the decoder of
# its codec are small beside it.
_SENTENCE_BYTES: Final = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechFamily:
    """A family of speech models in mlx-audio."""

    task: SpeechTask
    package: str
    """Its module below `mlx_audio`."""
    voice_folders: tuple[str, ...] = ()
    """Folders of the model's folder with one file for each voice."""


FAMILIES: Final = {
    "whisper": SpeechFamily(task="Transcribe", package="stt/models/whisper"),
    "pocket_tts": SpeechFamily(
        task="Speak", package="tts/models/pocket_tts", voice_folders=("voices", "embeddings")
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechShape:
    """Facts of a speech model for the memory proof."""

    family: SpeechFamily
    work_bytes: int
    """Bytes of temporary arrays and caches of a window or of a sentence, and of uploads; there is one at a time."""


def speech_shape(config: ModelConfig) -> SpeechShape | None:
    """Return the shape of a speech model; None for any other model."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return None
    if family.task == "Speak":
        return SpeechShape(family=family, work_bytes=_SENTENCE_BYTES)
    uploads = UPLOADS * UPLOAD_BYTES + DECODING_BYTES
    return SpeechShape(family=family, work_bytes=_window_bytes(config) + uploads)


def _window_bytes(config: ModelConfig) -> int:
    """Return the bytes of a window of whisper: a layer of its encoder, and all caches of its decoder.

    Counted with 4 bytes a number: attention scores are computed in float32 whatever the weights are. A config in the
    names of mlx-audio's own conversions, or of Hugging Face; the sizes of large-v3 stand for what is missing.
    """
    width = config.d_model or config.n_audio_state or 1280
    heads = config.encoder_attention_heads or config.n_audio_head or 20
    layers = config.decoder_layers or config.n_text_layer or 32
    frames = config.max_source_positions or config.n_audio_ctx or 1500
    tokens = config.max_target_positions or config.n_text_ctx or 448
    layer = frames * width * (_HIDDEN_COPIES + 4 * _FFN_COPIES) + _SCORE_COPIES * heads * frames**2
    caches = 2 * layers * width * (frames + 2 * tokens)
    convolutions = 3 * 2 * frames * width
    logits = 3 * tokens * (config.vocab_size or config.n_vocab or 51_866)
    # The spectrum is computed from the samples in complex numbers.
    spectrum = 8 * WINDOW_S * _MEL_FRAMES_PER_S * 400
    return 4 * (layer + caches + convolutions + logits + spectrum)
