"""Speech from text with a voice of mlx-audio: one sentence at a time. Worker thread only."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from engine.jobs import AudioOutput, SpeakJob
from models.model_files import ModelUnusableError
from models.speech_shape import SpeechFamily

# Seconds of speech between two pieces of a stream.
_PIECE_S: Final = 0.5
_MAX_VOICES: Final = 1000
_VOICE_SUFFIX: Final = ".safetensors"


def voice_names(folder: Path, family: SpeechFamily) -> tuple[str, ...]:
    """Return the names of the voices in a model's folder, sorted.

    Raises:
        ModelUnusableError: there are none, or too many.

    """
    paths = [path for name in family.voice_folders for path in (folder / name).glob("*")]
    names = sorted({path.stem.lower() for path in paths if path.suffix == _VOICE_SUFFIX})
    if not 0 < len(names) <= _MAX_VOICES:
        folders = " or ".join(f"{name}/*{_VOICE_SUFFIX}" for name in family.voice_folders)
        raise ModelUnusableError(
            f"{folder} has {len(names)} voices; at least one is needed, and at most {_MAX_VOICES}: {folders}"
        )
    return tuple(names)


@dataclass(slots=True)
class VoiceSynthesizer:
    """Runs `SpeakJob`s on a loaded model."""

    model: Any
    """A Model of a package of mlx_audio.tts."""

    def run(self, job: SpeakJob) -> Iterator[AudioOutput | None]:
        """Yield pieces of speech; None after a sentence: the model's codec keeps a state within one."""
        rate = int(self.model.sample_rate)
        for sentence in job.sentences:
            results = self.model.generate(
                text=sentence, voice=job.voice, stream=True, streaming_interval=_PIECE_S
            )
            for result in results:
                samples = to_pcm(result.audio)
                if samples:
                    yield AudioOutput(job_id=job.id, samples=samples, rate=rate)
            yield None
        yield AudioOutput(job_id=job.id, samples=b"", rate=rate, finish="stop")


def to_pcm(audio: Any) -> bytes:
    """Return an array of numbers from -1 to 1 as mono samples of 16 bits; what is no number is silence."""
    numbers = np.nan_to_num(np.array(mx.array(audio).astype(mx.float32)).reshape(-1))
    return bytes((np.clip(numbers, -1, 1) * 32_767).astype("<i2").tobytes())
