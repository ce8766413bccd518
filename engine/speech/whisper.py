"""Transcription with whisper: windows of 30 s, decoded by mlx-audio, cut into segments here. Worker thread only.

The spectrum is computed for each window, not for the whole audio, so that an hour takes no more memory than a minute.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_audio.stt.models.whisper import audio as whisper_audio
from mlx_audio.stt.models.whisper.decoding import DecodingOptions
from mlx_audio.stt.models.whisper.tokenizer import LANGUAGES

from engine.jobs import PcmFile, TranscribeJob, TranscriptOutput, TranscriptSegment

_HOP, _FRAMES = whisper_audio.HOP_LENGTH, whisper_audio.N_FRAMES
_WINDOW_SAMPLES: Final = whisper_audio.N_SAMPLES
# Whisper's own rules: a window whose text repeats itself, or that the model doubts, is sampled again, ever more freely;
# one that is probably silent has no text (openai/whisper).
_FALLBACKS: Final = (0.2, 0.4, 0.6, 0.8, 1.0)
_MAX_COMPRESSION, _MIN_LOGPROB, _MAX_NO_SPEECH = 2.4, -1.0, 0.6
# Text that was sampled as freely as this is no prompt for the next window.
_MAX_PROMPT_TEMPERATURE: Final = 0.5


@dataclass(slots=True)
class WhisperTranscriber:
    """Runs `TranscribeJob`s on a loaded whisper."""

    model: Any
    """An mlx_audio.stt.models.whisper.Model."""
    _vocabularies: dict[tuple[str, bool], "_Vocabulary"] = field(default_factory=dict)

    @property
    def languages(self) -> dict[str, str]:
        """Names of the languages that the model knows, by code."""
        most = self.model.num_languages if self.model.is_multilingual else 1
        return dict(list(LANGUAGES.items())[:most])  # English is the first

    @property
    def can_translate(self) -> bool:
        """True if it can write foreign speech down in English."""
        return bool(self.model.is_multilingual)

    def run(self, job: TranscribeJob) -> Iterator[TranscriptOutput | None]:
        """Yield the segments of each window; None after each piece of work, where another job may take its turn."""
        position, language = 0, job.language
        prompt: list[int] | None = None
        reset_at = 0
        while True:
            mel, frames = self._window(job.audio, position)
            if not language:
                language = self._detect_language(mel)
                yield None
            vocabulary = self._vocabulary(language, translates=job.translates)
            if prompt is None:
                prompt = vocabulary.encode(job.prompt)
            result = None
            for temperature in _temperatures(job.temperature):
                if result is not None:
                    yield None
                result = self._decode(mel, job, language, prompt[reset_at:], temperature)
                if not _is_implausible(result):
                    break
            assert result is not None
            at_s = position / PcmFile.RATE
            segments: tuple[TranscriptSegment, ...] = ()
            advance = frames
            if not _is_silent(result):
                segments, advance = vocabulary.segments(result, at_s=at_s, frames=frames)
            prompt += [token for segment in segments for token in segment.tokens]
            if result.temperature > _MAX_PROMPT_TEMPERATURE:
                reset_at = len(prompt)
            position += advance * _HOP
            is_over = job.audio.samples - position < _HOP
            yield TranscriptOutput(
                job_id=job.id,
                segments=segments,
                language=language,
                finish="stop" if is_over else None,
            )
            if is_over:
                return
            yield None

    def _window(self, audio: PcmFile, position: int) -> tuple[Any, int]:
        """Return the spectrum of the window at a sample, shape (3000, mels), and how many of its frames are audio."""
        raw = audio.read(position, _WINDOW_SAMPLES)
        samples = np.frombuffer(raw, "<i2").astype(np.float32) / 32_768
        frames = min(_FRAMES, len(samples) // _HOP)
        padded = np.pad(samples, (0, 2 * _WINDOW_SAMPLES - len(samples)))
        mel = whisper_audio.log_mel_spectrogram(mx.array(padded), n_mels=self.model.dims.n_mels)
        mel = whisper_audio.pad_or_trim(mel[:frames], _FRAMES, axis=-2).astype(self.model.dtype)
        return mel, frames

    def _detect_language(self, mel: Any) -> str:
        if not self.model.is_multilingual:
            return "en"
        _, probabilities = self.model.detect_language(mel)
        return str(max(probabilities, key=probabilities.get))

    def _decode(
        self, mel: Any, job: TranscribeJob, language: str, prompt: list[int], temperature: float
    ) -> Any:
        """Return mlx-audio's DecodingResult of one window."""
        options = DecodingOptions(
            task="translate" if job.translates else "transcribe",
            language=language,
            temperature=temperature,
            prompt=prompt,
            fp16=self.model.dtype == mx.float16,
        )
        return self.model.decode(mel, options)

    def _vocabulary(self, language: str, *, translates: bool) -> "_Vocabulary":
        key = (language, translates)
        if key not in self._vocabularies:
            task = "translate" if translates else "transcribe"
            tokenizer = self.model.get_tokenizer(language=language, task=task)
            stride = _FRAMES // self.model.dims.n_audio_ctx
            self._vocabularies[key] = _Vocabulary(tokenizer, stride)
        return self._vocabularies[key]


class _Vocabulary:
    """Text and timestamps among the tokens of a model."""

    def __init__(self, tokenizer: Any, stride: int) -> None:
        """`stride`: frames of the spectrum for each step of a timestamp."""
        self._tokenizer, self._stride = tokenizer, stride
        self._first_time, self._end = tokenizer.timestamp_begin, tokenizer.eot
        self._step_s = stride * _HOP / PcmFile.RATE

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(f" {text.strip()}")) if text.strip() else []

    def segments(
        self, result: Any, *, at_s: float, frames: int
    ) -> tuple[tuple[TranscriptSegment, ...], int]:
        """Return the segments of a window that begins at `at_s`, and how many frames to go on."""
        tokens: list[int] = result.tokens
        is_time = [token >= self._first_time for token in tokens]
        ends_once = is_time[-2:] == [False, True]
        # Two timestamps in a row end a segment and begin the next.
        cuts = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
        if not cuts:
            times = [token for token in tokens if token >= self._first_time]
            length_s = frames * _HOP / PcmFile.RATE
            if times and times[-1] != self._first_time:
                length_s = self._seconds(times[-1])
            return self._with_text([(at_s, at_s + length_s, tokens)], result), frames
        if ends_once:
            cuts.append(len(tokens))
        parts, begin = [], 0
        for cut in cuts:
            part = tokens[begin:cut]
            parts.append((at_s + self._seconds(part[0]), at_s + self._seconds(part[-1]), part))
            begin = cut
        advance = frames
        if not ends_once:
            # The last segment is cut off by the window, so the next window begins with it.
            advance = (tokens[begin - 1] - self._first_time) * self._stride
        return self._with_text(parts, result), advance if 0 < advance <= frames else frames

    def _seconds(self, token: int) -> float:
        return float(max(0, token - self._first_time) * self._step_s)

    def _with_text(
        self, parts: list[tuple[float, float, list[int]]], result: Any
    ) -> tuple[TranscriptSegment, ...]:
        segments = []
        for start_s, end_s, tokens in parts:
            text = self._tokenizer.decode([token for token in tokens if token < self._end])
            if start_s == end_s or not text.strip():
                continue
            segments.append(
                TranscriptSegment(
                    start_s=round(start_s, 2),
                    end_s=round(end_s, 2),
                    text=text,
                    tokens=tuple(tokens),
                    temperature=result.temperature,
                    avg_logprob=result.avg_logprob,
                    compression_ratio=result.compression_ratio,
                    no_speech_prob=result.no_speech_prob,
                )
            )
        return tuple(segments)


def _temperatures(first: float) -> tuple[float, ...]:
    return (first, *_FALLBACKS) if first == 0 else (first,)


def _is_implausible(result: Any) -> bool:
    """Return whether a window must be sampled again."""
    is_doubted = result.avg_logprob < _MIN_LOGPROB
    is_silence = is_doubted and result.no_speech_prob > _MAX_NO_SPEECH
    return not is_silence and bool(result.compression_ratio > _MAX_COMPRESSION or is_doubted)


def _is_silent(result: Any) -> bool:
    is_doubted = result.avg_logprob <= _MIN_LOGPROB
    return bool(result.no_speech_prob > _MAX_NO_SPEECH and is_doubted)
