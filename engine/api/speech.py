"""Routes of speech: transcripts of uploads, and speech from text.

Nothing is sent before the first window or the first piece of speech exists, as with text (app.py).
"""

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.api import web
from engine.api.generation_stream import Deadline, within
from engine.jobs import (
    AudioOutput,
    SpeakJob,
    SpeechJob,
    TranscribeJob,
    TranscriptOutput,
    TranscriptSegment,
)
from engine.openai import audio
from engine.openai.audio import SpeechBody, TranscriptionRequest
from engine.service import Service
from engine.speech import audio_encoder
from engine.speech.audio_encoder import AudioEncoder
from schemas.wire import headers
from schemas.wire.audio_limits import UPLOAD_BYTES, SpeechTask
from schemas.wire.body_limits import LEAST_LIMIT
from schemas.wire.errors import RefusedError
from schemas.wire.streams import WAITING

_EVENTS = "text/event-stream; charset=utf-8"
_EMPTY = memoryview(b"")
# A client that is gone is found when something is written, and a window takes seconds.
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class SpeechRoutes:
    """Routes of `/v1/audio/*`. Each parses one request and returns its ASGI response."""

    service: Service

    def routes(self) -> list[Route]:
        """Return the routes with their paths."""
        return [
            Route("/v1/audio/transcriptions", self.transcribe, methods=["POST"]),
            Route("/v1/audio/translations", self.translate, methods=["POST"]),
            Route("/v1/audio/speech", self.speak, methods=["POST"]),
        ]

    async def transcribe(self, request: Request) -> "SpeechResponse":
        """Return the text of speech."""
        return await self._transcribe(request, translates=False)

    async def translate(self, request: Request) -> "SpeechResponse":
        """Return the text of speech in English."""
        return await self._transcribe(request, translates=True)

    async def speak(self, request: Request) -> "SpeechResponse":
        """Return a text as speech."""
        deadline, raw = await self._read(request, "Speak", limit=LEAST_LIMIT)
        parsed = audio.parse_speech(raw)
        self._check_model(request, parsed.model)
        audio_encoder.check_format(parsed.response_format)
        media = _EVENTS if parsed.is_events else audio_encoder.MEDIA[parsed.response_format]
        return SpeechResponse(_speak(self.service, parsed, deadline), media, parsed.is_events)

    async def _transcribe(self, request: Request, *, translates: bool) -> "SpeechResponse":
        deadline, raw = await self._read(request, "Transcribe", limit=UPLOAD_BYTES)
        kind = request.headers.get("content-type", "")
        parsed = audio.parse_transcription(kind, raw, translates=translates)
        self._check_model(request, parsed.model)
        media = _EVENTS if parsed.is_streamed else parsed.media_type
        return SpeechResponse(
            _transcribe(self.service, parsed, deadline), media, parsed.is_streamed
        )

    async def _read(
        self, request: Request, task: SpeechTask, *, limit: int
    ) -> tuple[Deadline | None, bytes]:
        """Return the deadline and the body of a request; the engine's task is checked before the body is read."""
        arrived_s = self.service.clock.monotonic()
        self.service.speech(task)
        self.service.admission.check_room()
        options = web.read_options(request.headers)
        web.check_not_resumable(options)
        claimed = self.service.claim_body()
        body = await web.read_body(request, limit, claimed, is_form=task == "Transcribe")
        self.service.arrive()
        return Deadline.of(arrived_s, options.timeout_s), body

    def _check_model(self, request: Request, name: str) -> None:
        """Refuse the name of another model. A gateway leaves a form as it is, and tells the name in a header."""
        web.check_model(request.headers.get(headers.MODEL, name), self.service.config.served_names)


@dataclass(frozen=True, slots=True)
class SpeechResponse:
    """Response made of parts, the first of which is not sent before it exists. Its slot is free however it ends."""

    parts: AsyncGenerator[bytes, None]
    media_type: str
    is_events: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make and send the parts until the client disconnects."""
        await web.run_while_connected(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.parts) as parts:
            try:
                first = await anext(parts)
            except RefusedError as error:
                await web.refusal_response(error.refusal)(scope, receive, send)
                return
            head = [(b"content-type", self.media_type.encode()), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            last = b""
            try:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except RefusedError as error:
                if not self.is_events:
                    # A file that ends early must not look whole: the server closes the connection.
                    raise
                last = error.refusal.event()
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def _transcribe(
    service: Service, request: TranscriptionRequest, deadline: Deadline | None
) -> AsyncGenerator[bytes, None]:
    """Yield a transcript: an event for each window, or all of it at once."""
    served = service.speech("Transcribe")
    language = audio.check_language(request, served)
    async with within(service, deadline):
        pcm = await service.decode_audio(request.upload)
    plain = replace(request, upload=_EMPTY)
    del request  # the upload is not held while the model works
    job = partial(
        TranscribeJob,
        audio=pcm,
        language=language,
        translates=plain.translates,
        prompt=plain.prompt,
        temperature=plain.temperature,
    )
    segments: list[TranscriptSegment] = []
    has_begun = False
    async for output in _outputs(service, lambda id_: job(id=id_), plain.model, deadline):
        if output is None:
            if has_begun:
                yield WAITING
            continue
        assert isinstance(output, TranscriptOutput)
        language = output.language
        segments += output.segments
        text = audio.window_text(output.segments, is_first=len(segments) == len(output.segments))
        if plain.is_streamed and text:
            has_begun = True
            yield audio.transcript_event(text)
    if plain.is_streamed:
        yield audio.transcript_end(audio.transcript_text(segments), pcm.seconds)
    else:
        name = served.languages.get(language, language)
        yield audio.encode_transcript(plain, segments, language=name, seconds=pcm.seconds)


async def _speak(
    service: Service, request: SpeechBody, deadline: Deadline | None
) -> AsyncGenerator[bytes, None]:
    """Yield speech, piece by piece: events, or the bytes of a file."""
    voice = audio.check_voice(request.voice, service.speech("Speak"))
    job = partial(SpeakJob, sentences=audio.split_sentences(request.input), voice=voice)
    encoder: AudioEncoder | None = None
    async for output in _outputs(service, lambda id_: job(id=id_), request.model, deadline):
        if output is None:
            continue
        assert isinstance(output, AudioOutput)
        if encoder is None:
            encoder = audio_encoder.make_encoder(request.response_format, output.rate)
        piece = await asyncio.to_thread(encoder.encode, output.samples)
        if output.finish is not None:
            piece += await asyncio.to_thread(encoder.end)
        if piece and request.is_events:
            piece = audio.speech_event(base64.b64encode(piece).decode("ascii"))
        if piece:
            yield piece
    if request.is_events:
        yield audio.speech_end()


async def _outputs(
    service: Service,
    make_job: Callable[[int], SpeechJob],
    model: str,
    deadline: Deadline | None,
) -> AsyncGenerator[TranscriptOutput | AudioOutput | None, None]:
    """Yield the outputs of a job to its last one, and None in each pause; the job ends with this generator.

    Raises:
        RefusedError: there is no place for it, or it fails, or its deadline passes.

    """
    ticket = service.enter_speech(make_job, model=model)
    try:
        while True:
            async with within(service, deadline):
                output = await ticket.next(_PAUSE_S)
            if output is None:
                yield None
                continue
            assert isinstance(output, TranscriptOutput | AudioOutput)
            yield output
            if output.finish is not None:
                return
    finally:
        service.admission.leave(ticket)
