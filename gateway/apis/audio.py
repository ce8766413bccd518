"""OpenAI's API of speech. Forms with uploads pass through as they are; files of speech are streamed as they are made.

Engines send speech to gateways as events, which show whether it is whole; the client of a file gets the bytes in them.
"""

import base64
import binascii
from typing import Final

import msgspec
from typing_extensions import override

from gateway.apis.adapter import NO_MODEL, ApiAdapter, ResponseTranslator, decode
from gateway.json_limits import decode_members
from gateway.request import HttpRequest, InferenceRequest
from gateway.upstream.call import Headers
from machinery import multipart
from machinery.multipart import MultipartError
from schemas.wire.errors import Refusal, RefusedError, invalid

SPEECH: Final = "/v1/audio/speech"
UPLOADS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
PATHS: Final = (*UPLOADS, SPEECH)

_MEDIA: Final = {
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "flac": b"audio/flac",
    "wav": b"audio/wav",
    "pcm": b"audio/pcm",
}
_CONTENT_TYPE: Final = b"content-type"
_DATA: Final = b"data: {"
_MAX_NAME_BYTES: Final = 1000


class SpeechBody(msgspec.Struct):
    """Fields of a body of `/v1/audio/speech` that the gateway reads; the engine validates all."""

    model: str
    response_format: str = "mp3"
    stream_format: str = "audio"


class _AudioEvent(msgspec.Struct):
    audio: str = ""


_BODY: Final = msgspec.json.Decoder(SpeechBody)
_EVENT: Final = msgspec.json.Decoder(_AudioEvent)


class FileTranslator(ResponseTranslator):
    """Turns events with pieces of a file into the file."""

    is_file = True

    def __init__(self, media_type: bytes) -> None:
        self._media_type = media_type

    @override
    def begin(self, headers: Headers) -> Headers:
        others = [(name, value) for name, value in headers if name != _CONTENT_TYPE]
        return [(_CONTENT_TYPE, self._media_type), *others]

    @override
    def events(self, data: bytes) -> bytes:
        lines = (line for line in data.split(b"\n") if line.startswith(_DATA))
        try:
            parts = [_EVENT.decode(line[len(_DATA) - 1 :]).audio for line in lines]
            return b"".join(base64.b64decode(part, validate=True) for part in parts)
        except (msgspec.MsgspecError, binascii.Error) as error:
            raise ValueError("the engine sent an event that is no piece of speech") from error

    @override
    def broken(self, refusal: Refusal) -> bytes:
        del refusal  # a file has no place for it: its connection is cut off
        return b""


class AudioAdapter(ApiAdapter):
    """Adapter of `PATHS`."""

    @override
    def read(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator | None]:
        if http_request.path == SPEECH:
            return _read_speech(http_request)
        return _read_upload(http_request), None


def _read_speech(
    http_request: HttpRequest,
) -> tuple[InferenceRequest, ResponseTranslator | None]:
    fields = decode(_BODY, http_request.body)
    body, translator = http_request.body, None
    if fields.stream_format == "audio" and fields.response_format in _MEDIA:
        body = msgspec.json.encode({**decode_members(body), "stream_format": "sse"})
        translator = FileTranslator(_MEDIA[fields.response_format])
    request = InferenceRequest(
        path=SPEECH,
        model=fields.model,
        body=body,
        request_id=http_request.request_id,
        headers=http_request.headers,
        is_streamed=True,
        timeout_s=http_request.timeout_s(),
    )
    return request, translator


def _read_upload(http_request: HttpRequest) -> InferenceRequest:
    content_type = http_request.fields.get(_CONTENT_TYPE, b"")
    try:
        parts = multipart.parse(content_type.decode("latin-1"), http_request.body)
    except MultipartError as error:
        raise invalid(f"The body is no valid form: {error}.") from error
    # Of several fields of a name, the engine takes the last one, too.
    small = {part.name: part.content for part in parts if len(part.content) <= _MAX_NAME_BYTES}
    model = bytes(small.get("model", b"")).decode("utf-8", "replace")
    if not model:
        raise RefusedError(NO_MODEL)
    return InferenceRequest(
        path=http_request.path,
        model=model,
        body=http_request.body,
        content_type=content_type,
        request_id=http_request.request_id,
        headers=http_request.headers,
        is_streamed=bytes(small.get("stream", b"")).strip().lower() in (b"true", b"1"),
        timeout_s=http_request.timeout_s(),
    )
