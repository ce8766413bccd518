"""Requests and responses of `/v1/audio/*`: from bytes to jobs, and from transcripts to text. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

import orjson
from pydantic import BaseModel, ConfigDict, Field

from engine.jobs import TranscriptSegment
from engine.openai import request_body
from engine.openai.parameters import EndpointParameters, LenientModel, LimitedParameter
from engine.ports import ServedSpeech
from engine.speech.audio_encoder import AudioFormat
from machinery import multipart
from machinery.multipart import MultipartError
from schemas.wire.errors import invalid

TranscriptFormat: TypeAlias = Literal["json", "text", "srt", "verbose_json", "vtt"]

MAX_INPUT_CHARACTERS: Final = 4096
"""Characters of a text to speak: OpenAI's limit."""
_MAX_FIELD_BYTES: Final = 64 << 10
# A voice makes one sentence at a time; others wait until it ends.
_MAX_SENTENCE: Final = 300
_SENTENCE_END: Final = re.compile("(?<=[.!?\n\u2026\u3002\uff01\uff1f])\\s+")
_MEDIA: Final[Mapping[str, str]] = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}


class TranslationForm(BaseModel):
    """Fields of the form of `/v1/audio/translations`; `file` is described here and read elsewhere, without a copy."""

    model_config = ConfigDict(extra="ignore")

    model: str
    file: Annotated[str, Field(json_schema_extra={"format": "binary"})] = ""
    prompt: str = ""
    response_format: TranscriptFormat = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0


class TranscriptionForm(TranslationForm):
    """Fields of the form of `/v1/audio/transcriptions`."""

    language: str = ""
    stream: bool = False
    user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionRequest:
    """One checked request for a transcript."""

    model: str
    upload: memoryview
    language: str
    """Empty to detect it."""
    prompt: str
    format: TranscriptFormat
    temperature: float
    is_streamed: bool
    translates: bool

    @property
    def media_type(self) -> str:
        """The type of the whole answer."""
        return _MEDIA[self.format]


class SpeechBody(LenientModel):
    """Body of `/v1/audio/speech`."""

    model: str
    input: Annotated[str, Field(min_length=1, max_length=MAX_INPUT_CHARACTERS)]
    voice: str = ""
    response_format: AudioFormat = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    user: str | None = None

    @property
    def is_events(self) -> bool:
        """True for server-sent events, false for the bytes of a file."""
        return self.stream_format == "sse"


TRANSLATION_PARAMETERS: Final = EndpointParameters(model=TranslationForm)
TRANSCRIPTION_PARAMETERS: Final = EndpointParameters(
    model=TranscriptionForm,
    limited={
        "timestamp_granularities": LimitedParameter(
            values=(["segment"],), reason="Segments have times, words have none."
        ),
        "chunking_strategy": LimitedParameter(
            values=("auto",), reason="Windows of 30 s follow each other.", is_hint=True
        ),
    },
)
SPEECH_PARAMETERS: Final = EndpointParameters(
    model=SpeechBody,
    limited={"speed": LimitedParameter(values=(1, 1.0), reason="A voice has one speed.")},
)


def parse_transcription(
    content_type: str, body: bytes | bytearray, *, translates: bool
) -> TranscriptionRequest:
    """Parse a form.

    Raises:
        RefusedError: it is no form, or a field is wrong or not supported.

    """
    try:
        parts = multipart.parse(content_type, body)
    except MultipartError as error:
        raise invalid(f"The body is no valid form: {error}.") from error
    fields: dict[str, object] = {}
    upload: memoryview | None = None
    for part in parts:
        name = part.name.removesuffix("[]")
        if name == "file":
            upload = part.content
            continue
        if len(part.content) > _MAX_FIELD_BYTES:
            raise invalid(
                f"'{name[:100]}' is longer than {_MAX_FIELD_BYTES} bytes.", param=name[:100]
            )
        text = bytes(part.content).decode("utf-8", "replace")
        if part.name.endswith("[]"):
            fields[name] = [*_texts(fields.get(name)), text]
        else:
            fields[name] = text
    (TRANSLATION_PARAMETERS if translates else TRANSCRIPTION_PARAMETERS).check(fields)
    form = request_body.validate(TranscriptionForm, fields)
    if not upload:
        raise invalid("'file' must be an audio file with content.", param="file")
    return TranscriptionRequest(
        model=form.model,
        upload=upload,
        language=form.language.strip().lower(),
        prompt=form.prompt,
        format=form.response_format,
        temperature=form.temperature,
        is_streamed=form.stream,
        translates=translates,
    )


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def parse_speech(raw: bytes) -> SpeechBody:
    """Parse a body, which has something to say.

    Raises:
        RefusedError: a value is wrong or not supported.

    """
    fields = request_body.read_object(raw)
    SPEECH_PARAMETERS.check(fields)
    body = request_body.validate(SpeechBody, fields)
    if not split_sentences(body.input):
        raise invalid("'input' has nothing to say.", param="input")
    return body


def split_sentences(text: str) -> tuple[str, ...]:
    """Return a text as sentences of at most 300 characters, cut at spaces where one is longer."""
    sentences: list[str] = []
    for sentence in _SENTENCE_END.split(text.strip()):
        rest = " ".join(sentence.split())
        while len(rest) > _MAX_SENTENCE:
            cut = rest.rfind(" ", 1, _MAX_SENTENCE + 1)
            cut = _MAX_SENTENCE if cut < 0 else cut
            sentences.append(rest[:cut])
            rest = rest[cut:].lstrip()
        if any(character.isalnum() for character in rest):
            sentences.append(rest)
    return tuple(sentences)


def check_language(request: TranscriptionRequest, served: ServedSpeech) -> str:
    """Return the code of the request's language; empty to detect it.

    Raises:
        RefusedError: the model does not know it, or cannot translate.

    """
    if request.translates and not served.can_translate:
        raise invalid(
            "This model understands English only, so it has nothing to translate; use /v1/audio/transcriptions.",
            param="model",
            code="not_a_translation_model",
        )
    codes = {name: code for code, name in served.languages.items()}
    language = codes.get(request.language, request.language)
    if language and language not in served.languages:
        known = ", ".join(sorted(served.languages))
        raise invalid(
            f"This model does not know the language '{language[:50]}'; it knows {known}.",
            param="language",
        )
    return language


def check_voice(voice: str, served: ServedSpeech) -> str:
    """Return the name of the request's voice, or of the model's first.

    Raises:
        RefusedError: the model does not have it.

    """
    name = voice.lower() or served.voices[0]
    if name not in served.voices:
        raise invalid(
            f"This model has no voice '{voice[:100]}'; it has {', '.join(served.voices)}.",
            param="voice",
            code="voice_not_found",
        )
    return name


def transcript_text(segments: Iterable[TranscriptSegment]) -> str:
    """Return the text of segments."""
    return "".join(segment.text for segment in segments).strip()


def window_text(segments: Iterable[TranscriptSegment], *, is_first: bool) -> str:
    """Return the text of a window, whose beginning parts it from the window before; the first one has none."""
    text = "".join(segment.text for segment in segments).rstrip()
    return text.lstrip() if is_first else text


def encode_transcript(
    request: TranscriptionRequest,
    segments: Sequence[TranscriptSegment],
    *,
    language: str,
    seconds: float,
) -> bytes:
    """Return a transcript in the format of its request; `language` is a name."""
    if request.format == "text":
        return (transcript_text(segments) + "\n").encode()
    if request.format == "srt":
        blocks = (
            f"{number}\n{_time(s.start_s, ',')} --> {_time(s.end_s, ',')}\n{s.text.strip()}\n\n"
            for number, s in enumerate(segments, 1)
        )
        return "".join(blocks).encode()
    if request.format == "vtt":
        blocks = (
            f"{_time(s.start_s, '.')} --> {_time(s.end_s, '.')}\n{s.text.strip()}\n\n"
            for s in segments
        )
        return ("WEBVTT\n\n" + "".join(blocks)).encode()
    body: dict[str, object] = {"text": transcript_text(segments)}
    if request.format == "verbose_json":
        body |= {
            "task": "translate" if request.translates else "transcribe",
            "language": language,
            "duration": round(seconds, 2),
            "segments": [_segment_fields(number, s) for number, s in enumerate(segments)],
        }
    return orjson.dumps(body | {"usage": _usage(seconds)})


def _usage(seconds: float) -> dict[str, object]:
    return {"type": "duration", "seconds": round(seconds)}


def _segment_fields(number: int, segment: TranscriptSegment) -> dict[str, object]:
    return {
        "id": number,
        "seek": round(100 * segment.start_s),
        "start": segment.start_s,
        "end": segment.end_s,
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _time(seconds: float, mark: str) -> str:
    """Return a time of subtitles, such as 00:01:02,500."""
    millis = round(1000 * seconds)
    hours, rest = divmod(millis, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"


def transcript_event(text: str) -> bytes:
    """Return the event of a window of a streamed transcript."""
    return _event({"type": "transcript.text.delta", "delta": text})


def transcript_end(text: str, seconds: float) -> bytes:
    """Return the last events of a streamed transcript."""
    done = {"type": "transcript.text.done", "text": text, "usage": _usage(seconds)}
    return _event(done) + b"data: [DONE]\n\n"


def speech_event(audio: str) -> bytes:
    """Return the event of a piece of speech, in base64."""
    return _event({"type": "speech.audio.delta", "audio": audio})


def speech_end() -> bytes:
    """Return the last events of streamed speech."""
    return _event({"type": "speech.audio.done"}) + b"data: [DONE]\n\n"


def _event(fields: Mapping[str, object]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"
