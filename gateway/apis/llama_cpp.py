"""llama.cpp's route for editors, `/infill`: translates to OpenAI's completions with a suffix, and back."""

from typing import Any

import msgspec
import orjson
from typing_extensions import override

from gateway.apis import adapter as common
from gateway.apis.adapter import ApiAdapter, ResponseTranslator, decode
from gateway.apis.openai_response import AnswerTranslator, EngineError, ResponseChoice
from gateway.request import HttpRequest, InferenceRequest
from schemas.wire.errors import invalid

INFILL = "/infill"
_STOP_TYPES = {"length": "limit", "stop": "eos"}


class InfillFile(msgspec.Struct):
    """Another file of the project, or a part of one."""

    text: str
    filename: str = "file"


class InfillBody(msgspec.Struct):
    """Body of `/infill`; the engine checks all other fields, as in completions."""

    model: str
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[InfillFile] = []
    prompt: str = ""
    """Text between the prefix and the gap, such as the beginning of the line."""
    n_predict: int = -1
    """The most tokens to generate: -1 for no limit, 0 to read the prompt only."""
    stream: bool = False


_DECODER = msgspec.json.Decoder(InfillBody)


def to_openai(body: bytes) -> tuple[InfillBody, dict[str, Any]]:
    """Return the body, and the request as an OpenAI completion request.

    Raises:
        RefusedError: the body is invalid.

    """
    given = decode(_DECODER, body)
    if given.n_predict < -1:
        raise invalid("'n_predict' must be -1 or more.", param="n_predict")
    own = InfillBody.__struct_fields__
    others = {name: value for name, value in msgspec.json.decode(body).items() if name not in own}
    completion = {
        **others,
        "model": given.model,
        "prompt": given.input_prefix + given.prompt,
        "suffix": given.input_suffix,
        "input_extra": msgspec.to_builtins(given.input_extra),
        "max_tokens": given.n_predict or 1,
        "fit_max_tokens": True,
        "include_performance": True,
        "stream": given.stream,
    }
    return given, completion | ({"stream_options": {"include_usage": True}} if given.stream else {})


class LlamaCppAdapter(ApiAdapter):
    """Adapter of `/infill`."""

    @override
    def read(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        given, completion = to_openai(http_request.body)
        try:
            request = common.to_inference_request(http_request, "/v1/completions", completion)
        except orjson.JSONEncodeError as error:
            raise common.unencodable(error) from error
        return request, InfillTranslator(given.model, is_silent=given.n_predict == 0)


class InfillTranslator(AnswerTranslator):
    """Translates one response of `/infill`; errors have OpenAI's form there, too."""

    def __init__(self, model: str, *, is_silent: bool) -> None:
        """`is_silent`: True if the client only wants its prompt to be read."""
        super().__init__()
        self._model = model
        self._is_silent = is_silent

    @override
    def message(self, choice: ResponseChoice) -> bytes:
        return orjson.dumps(self._last(choice.text or ""))

    @override
    def piece(self, choice: ResponseChoice) -> bytes:
        if not choice.text or self._is_silent:
            return b""
        return _event({"index": 0, "content": choice.text, "stop": False})

    @override
    def last(self) -> bytes:
        return _event(self._last(""))

    @override
    def failure(self, error: EngineError) -> bytes:
        return _event({"error": {"message": error.message, "code": error.code}})

    def _last(self, text: str) -> dict[str, Any]:
        """Return the end of a response, with its text if it was not streamed."""
        usage, took, last = self.usage, self.performance, self.final
        predicted, rate = usage.completion_tokens, took.decode_tokens_per_s
        read, read_s = usage.prompt_tokens - usage.cached_tokens, took.prefill_s or 0
        stop_type = _STOP_TYPES.get(last.finish_reason or "", "none")
        return {
            "index": 0,
            "content": "" if self._is_silent else text,
            "stop": True,
            "model": self._model,
            "tokens_predicted": predicted,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.prompt_tokens,
            "truncated": False,
            "stop_type": "word" if last.stop_reason else stop_type,
            "stopping_word": last.stop_reason or "",
            "timings": {
                "prompt_n": read,
                "prompt_ms": read_s * 1e3,
                "prompt_per_second": read / read_s if read_s else 0.0,
                "predicted_n": predicted,
                "predicted_ms": predicted / rate * 1e3 if rate else 0.0,
                "predicted_per_second": rate or 0.0,
            },
        }


def _event(members: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(members) + b"\n\n"
