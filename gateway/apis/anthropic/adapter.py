"""Anthropic's requests to models."""

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
from gateway.request import HttpRequest, InferenceRequest

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PATHS = (MESSAGES, COUNT)


class AnthropicAdapter(ApiAdapter):
    """The surface of `PATHS`."""

    @override
    def telling(self) -> ResponseTranslator:
        return ClientErrorTranslator()

    @override
    def read(self, heard: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
        try:
            return _read(heard)
        except orjson.JSONEncodeError as error:
            raise common.unencodable(error) from error


def _read(heard: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator]:
    if heard.path == COUNT:
        body = request_translator.count_to_chat(request_translator.read_count(heard.body))
        return common.to_inference_request(heard, "/tokenize", body), TokenCountTranslator()
    asked = request_translator.read_messages(heard.body)
    session = asked.metadata.user_id if asked.metadata is not None else None
    ask = common.to_inference_request(
        heard,
        "/v1/chat/completions",
        request_translator.messages_to_chat(asked),
        session=session or "",
    )
    is_shown = asked.thinking is None or asked.thinking.display != "omitted"
    return ask, MessageTranslator(asked.model, asked.max_tokens, shows_thoughts=is_shown)
