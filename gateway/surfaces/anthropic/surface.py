"""Anthropic's requests to models."""

import orjson
from typing_extensions import override

from gateway.asks import Ask, Heard
from gateway.clients.surface import Surface, Telling
from gateway.surfaces import asking as common
from gateway.surfaces.anthropic import asking
from gateway.surfaces.anthropic.refusing import Counting, Unread
from gateway.surfaces.anthropic.telling import Messaging

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PATHS = (MESSAGES, COUNT)


class Anthropic(Surface):
    """The surface of `PATHS`."""

    @override
    def telling(self) -> Telling:
        return Unread()

    @override
    def read(self, heard: Heard) -> tuple[Ask, Telling]:
        try:
            return _read(heard)
        except orjson.JSONEncodeError as error:
            raise common.impossible(error) from error


def _read(heard: Heard) -> tuple[Ask, Telling]:
    if heard.path == COUNT:
        body = asking.count(asking.read_count(heard.body))
        return common.ask(heard, "/tokenize", body), Counting()
    asked = asking.read_messages(heard.body)
    session = asked.metadata.user_id if asked.metadata is not None else None
    ask = common.ask(heard, "/v1/chat/completions", asking.messages(asked), session=session or "")
    is_shown = asked.thinking is None or asked.thinking.display != "omitted"
    return ask, Messaging(asked.model, asked.max_tokens, shows_thoughts=is_shown)
