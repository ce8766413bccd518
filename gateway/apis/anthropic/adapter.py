"""Adapter of Anthropic's Messages API."""

import orjson
from typing_extensions import override

from gateway.apis import adapter as common
from gateway.apis.adapter import ApiAdapter, ResponseTranslator
from gateway.apis.anthropic import request_translator
from gateway.apis.anthropic.response_translator import (
    ClientErrorTranslator,
    MessageTranslator,
    TokenCountTranslator,
)
from gateway.auth.rate_limits import Rates, anthropic_headers
from gateway.request import HttpRequest, InferenceRequest
from gateway.upstream.call import Headers

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PATHS = (MESSAGES, COUNT)


class AnthropicAdapter(ApiAdapter):
    """Adapter of `PATHS`."""

    @override
    def rate_headers(self, rates: Rates) -> Headers:
        return anthropic_headers(rates)

    @override
    def error_translator(self) -> ResponseTranslator:
        return ClientErrorTranslator()

    @override
    def read(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        try:
            return _read(http_request)
        except orjson.JSONEncodeError as error:
            raise common.unencodable(error) from error


def _read(http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
    if http_request.path == COUNT:
        counted = request_translator.read_count(http_request.body)
        edits = request_translator.edit_context(counted)
        body = request_translator.count_to_chat(counted)
        body["return_tokens"] = False
        request = common.to_inference_request(http_request, "/tokenize", body)
        return request, TokenCountTranslator(edits)
    body_fields = request_translator.read_messages(http_request.body)
    edits = request_translator.edit_context(body_fields)
    session = body_fields.metadata.user_id if body_fields.metadata is not None else None
    request = common.to_inference_request(
        http_request,
        "/v1/chat/completions",
        request_translator.messages_to_chat(body_fields),
        session=session or "",
    )
    is_shown = body_fields.thinking is None or body_fields.thinking.display != "omitted"
    return request, MessageTranslator(
        body_fields.model, body_fields.max_tokens, shows_thoughts=is_shown, edits=edits
    )
