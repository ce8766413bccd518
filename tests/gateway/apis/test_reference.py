"""`docs/reference/{ollama,anthropic}.md` match the code, and cover all fields of the clients."""

import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import ollama
import orjson
import pytest
from anthropic.types import message_create_params
from pydantic import BaseModel

from engine.openai import similarity, tokenization
from engine.openai.parameters import EndpointParameters
from gateway.apis.anthropic import request_translator as messages
from gateway.apis.anthropic import response_translator
from gateway.apis.ollama import request_translator
from schemas.wire.errors import RefusedError
from tests.support.engine_reference import paths as vllm_paths

DOCS = Path(__file__).parents[3] / "docs" / "reference"
Json = dict[str, Any]


def rows(page: str, heading: str) -> dict[str, str]:
    """Return the verdict of each row in the first table below a heading."""
    text = (DOCS / f"{page}.md").read_text().split(f"\n## {heading}")[1]
    table = text.split("|---|---|---|\n")[1].split("\n\n")[0]
    found = re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE)
    assert len(found) == len(table.splitlines()), "a row does not name one field"
    assert [name for name, _ in found] == sorted(name for name, _ in found)
    return dict(found)


CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
GENERATE: Json = {"model": "m", "prompt": "hi"}
MESSAGES: Json = {**CHAT, "max_tokens": 5}


def chat(body: Json) -> Json:
    return request_translator.chat_to_openai(request_translator.read_chat(orjson.dumps(body)))


def generate(body: Json) -> Json:
    return request_translator.generate_to_openai(
        request_translator.read_generate(orjson.dumps(body))
    )


def message(body: Json) -> Json:
    return messages.messages_to_chat(messages.read_messages(orjson.dumps(body)))


# A value for each field that has no effect or is refused.
GIVEN: Json = {
    "keep_alive": "5m", "shift": True, "truncate": True, "context": [1], "height": 1, "width": 1, "steps": 1,
    "images": ["aGk="], "suffix": "x", "template": "x", "container": "x", "mcp_servers": [{}],
    "service_tier": "auto", "options": {"seed": 1}, "context_management": {"edits": []},
}  # fmt: skip
PAGES = [
    pytest.param("ollama", "Chat", request_translator.ChatBody, chat, CHAT, id="chat"),
    pytest.param(
        "ollama", "Generate", request_translator.GenerateBody, generate, GENERATE, id="generate"
    ),
    pytest.param("anthropic", "Messages", messages.MessagesBody, message, MESSAGES, id="messages"),
]


@pytest.mark.parametrize(("page", "heading", "kind", "translate", "body"), PAGES)
def test_the_page_says_what_the_code_does(
    page: str, heading: str, kind: type[msgspec.Struct], translate: Any, body: Json
) -> None:
    said = rows(page, heading)
    assert said.keys() == set(kind.__struct_fields__)
    usual = translate(body)
    for name, verdict in said.items():
        changed = {**body, name: GIVEN.get(name, {"x": 1})}
        if verdict == "no effect":
            assert translate(changed) == usual, name
        elif verdict == "refused":
            with pytest.raises(RefusedError, match=r"leave|This|give|send"):
                translate(changed)


def test_options() -> None:
    wanted = {
        name: "honoured" if name == own else "mapped"
        for name, own in request_translator.MAPPED.items()
    }
    wanted |= dict.fromkeys(request_translator.NO_EFFECT, "no effect")
    wanted |= dict.fromkeys(request_translator.NEUTRAL, "refused")
    assert rows("ollama", "Options") == wanted | {request_translator.CONTEXT: "honoured"}
    assert set(ollama.Options.model_fields) <= rows("ollama", "Options").keys()


def test_embeddings() -> None:
    fields = {
        *request_translator.EmbedBody.__struct_fields__,
        *request_translator.EmbeddingsBody.__struct_fields__,
    }
    assert rows("ollama", "Embeddings").keys() == fields


def test_every_field_of_the_clients_is_on_the_pages() -> None:
    known: dict[str, type[BaseModel]] = {
        "Chat": ollama._types.ChatRequest,
        "Generate": ollama._types.GenerateRequest,
    }
    for heading, kind in known.items():
        assert set(kind.model_fields) <= rows("ollama", heading).keys()
    base = message_create_params.MessageCreateParamsBase
    # The last is a header.
    fields = typing.get_type_hints(base).keys() - {"workspace_id"}
    assert {"max_tokens", "thinking"} <= fields <= rows("anthropic", "Messages").keys()


def test_statuses() -> None:
    table = (DOCS / "anthropic.md").read_text().split("| status | type |\n|---|---|\n")[1]
    found = re.findall(r"^\| ([\d, ]+) \| `(\w+)`", table.split("\n\n")[0], re.MULTILINE)
    for statuses, kind in found:
        for status in map(int, statuses.split(", ")):
            told = orjson.loads(response_translator.error_body(status, "no", "1"))
            assert told["error"]["type"] == kind, status


@pytest.mark.parametrize(
    ("path", "accepted"),
    [
        ("/tokenize", tokenization.TOKENIZE_PARAMETERS),
        ("/detokenize", tokenization.DETOKENIZE_PARAMETERS),
        ("/v1/score", similarity.SCORE_PARAMETERS),
        ("/v1/rerank", similarity.RERANK_PARAMETERS),
    ],
)
def test_vllms_paths(path: str, accepted: EndpointParameters) -> None:
    honoured, labels = vllm_paths()[path]
    assert honoured | labels == accepted.names
