"""Generates the OpenAPI document of the gateway, and its page: from the routes and from the types that check bodies.

Bodies of OpenAI's API are those that engines check, bodies of the other APIs those that the gateway checks.
"""

import json
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from fastapi import FastAPI

from engine.api import openapi as engine_openapi
from gateway.admin.routes import LOG_PATH
from gateway.apis import audio, llama_cpp, registry
from gateway.apis.anthropic import request_translator as anthropic
from gateway.apis.ollama import request_translator as ollama
from gateway.apis.openai import PATHS as OPENAI_PATHS
from gateway.app import make_app
from gateway.auth.roles import PUBLIC_PATHS, needed_role
from gateway.forwarding.model_state import ModelStates
from gateway.limits import GatewayLimits
from gateway.server import Gateway
from machinery.clock import SystemClock
from machinery.version import version
from store.memory import MemoryTransport

Json: TypeAlias = dict[str, Any]

_SCHEMA_PATH = "#/components/schemas/"
_JSON, _STREAM, _LINES, _TEXT = (
    "application/json",
    "text/event-stream",
    "application/x-ndjson",
    "text/plain",
)
_ADMIN_PATHS = (
    *("/api/cluster/", "/api/dashboard/", "/api/requests/"),
    *("/queue", "/metrics/snapshot"),
)
# Bodies of the translated APIs by path, with the content type of a streamed response.
_TRANSLATED: Mapping[str, Mapping[str, tuple[type[msgspec.Struct], str]]] = {
    "Ollama": {
        "/api/chat": (ollama.ChatBody, _LINES),
        "/api/generate": (ollama.GenerateBody, _LINES),
        "/api/embed": (ollama.EmbedBody, ""),
        "/api/embeddings": (ollama.EmbeddingsBody, ""),
    },
    "llama.cpp": {llama_cpp.INFILL: (llama_cpp.InfillBody, _STREAM)},
    "Anthropic": {
        "/v1/messages": (anthropic.MessagesBody, _STREAM),
        "/v1/messages/count_tokens": (anthropic.CountBody, ""),
    },
}
_MODEL_SUMMARIES = {
    "/v1/chat/completions": "Generate the next message of a conversation.",
    "/v1/completions": "Continue a text.",
    "/v1/responses": "Generate a response, stored for its API key unless `store` is false.",
    "/v1/embeddings": "Return the embeddings of texts.",
    "/v1/score": "Return the similarity of texts in pairs.",
    "/v1/rerank": "Return documents in the order of their similarity to a query.",
    "/v1/audio/transcriptions": "Return the text of speech.",
    "/v1/audio/translations": "Return the text of speech in English.",
    "/v1/audio/speech": "Return a text as speech.",
    "/tokenize": "Return the tokens of a prompt, and their number.",
    "/detokenize": "Return the text of tokens.",
    "/v1/messages": "Generate the next message, in Anthropic's format.",
    "/v1/messages/count_tokens": "Count the tokens of a conversation, in Anthropic's format.",
    "/infill": "Fill the gap between two texts, in llama.cpp's format.",
    "/api/chat": "Generate the next message, in Ollama's format.",
    "/api/generate": "Continue a prompt, in Ollama's format.",
    "/api/embed": "Return the embeddings of texts, in Ollama's format.",
    "/api/embeddings": "Return the embedding of one text, in Ollama's older format.",
}
_REFUSALS = {
    "400": "The request is invalid, or no engine supports what it asks for.",
    "401": "The API key is missing or unknown.",
    "403": "The API key may not use this model.",
    "404": "No model of that name is served.",
    "413": "The body is larger than `--max-body`.",
    "415": "The body is compressed.",
    "429": "A limit of the key, or the queue of the model, is full; see `Retry-After`.",
    "431": "The headers are too large.",
    "500": "An internal error of the gateway or of an engine.",
    "503": "No engine can serve the model now, or every one that was tried failed; see `Retry-After`.",
    "504": "The deadline passed, or an engine was silent for too long.",
}


def make_gateway_app() -> FastAPI:
    """Return the gateway's application over an empty store in memory; nothing is started."""
    clock, transport = SystemClock(), MemoryTransport(SystemClock())
    gateway = Gateway(
        transport, clock, random.Random(0), GatewayLimits(), url="http://127.0.0.1:4000"
    )
    states = ModelStates(clock, silence_s=1.0, keep_alive_s=1.0)
    return make_app(gateway._admin_context(transport, "docs", states))  # noqa: SLF001 - the context is built nowhere else


def gateway_routes() -> Iterator[tuple[str, str, Json]]:
    """Yield method, path and operation of everything that a gateway answers, except HEAD.

    The operation of a path that FastAPI does not answer itself has its summary only.
    """
    model_paths = (*OPENAI_PATHS, *registry.PATHS)
    for path in model_paths:
        yield "post", path, {"description": _MODEL_SUMMARIES[path]}
    with warnings.catch_warnings():
        # Operation ids of several methods of one function are equal, and are not used here.
        warnings.simplefilter("ignore")
        described = make_gateway_app().openapi()["paths"]
    for path, operations in described.items():
        # The application has the model paths only to refuse other methods.
        if path in model_paths or path.endswith("models/"):
            continue
        for method in sorted(set(operations) - {"head", "options"}):
            yield method, path, operations[method]


def document() -> Json:
    """Return the OpenAPI document."""
    bodies, schemas = _bodies()
    paths: Json = {}
    for method, path, own in gateway_routes():
        paths.setdefault(path, {})[method] = _operation(path, bodies.get(path), own)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlx-fleet gateway",
            "version": version(),
            "description": "The APIs of OpenAI, Anthropic and Ollama over a fleet of Macs, and a read-only admin API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:4000"}],
        "security": [{"bearer": []}, {"apiKey": []}],
        "tags": [{"name": one} for one in ("OpenAI", "Anthropic", "Ollama", "Admin", "Operation")],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    schema: str
    media_type: str = _JSON
    stream: str = ""
    """Content type of a streamed response; empty if there is none."""


def _bodies() -> tuple[dict[str, _Body], Json]:
    """Return the body of each path, and all schemas."""
    of_engines = engine_openapi.build_document([], version=version())["components"]["schemas"]
    bodies = {
        path: _Body(
            schema=body.accepted.model.__name__,
            media_type=body.media_type,
            stream=_STREAM if body.is_streamable else "",
        )
        for path, body in engine_openapi.route_bodies().items()
        if path in (*OPENAI_PATHS, *audio.PATHS)
    }
    schemas: Json = dict(of_engines)
    for api, translated in _TRANSLATED.items():
        references, definitions = msgspec.json.schema_components(
            [kind for kind, _ in translated.values()], ref_template=_SCHEMA_PATH + "{name}"
        )
        names = {name: f"{api}{name.removeprefix(api)}" for name in definitions}
        schemas |= {names[name]: _renamed(one, names) for name, one in definitions.items()}
        for (path, (_, stream)), reference in zip(translated.items(), references, strict=True):
            name = names[reference["$ref"].rpartition("/")[2]]
            bodies[path] = _Body(schema=name, stream=stream)
    return bodies, dict(sorted(schemas.items()))


def _renamed(schema: Any, names: Mapping[str, str]) -> Any:
    """Return a schema whose references and title have the new names."""
    if isinstance(schema, list):
        return [_renamed(one, names) for one in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: _renamed(value, names) for key, value in schema.items()}
    for key, text in renamed.items():  # "$ref", and the values of a discriminator's mapping
        if isinstance(text, str) and text.startswith(_SCHEMA_PATH):
            renamed[key] = _SCHEMA_PATH + names[text.removeprefix(_SCHEMA_PATH)]
    if renamed.get("title") in names:
        renamed["title"] = names[renamed["title"]]
    return renamed


def _summary(own: Json) -> str:
    return str(own.get("description", "")).partition("\n")[0]


def _operation(path: str, body: _Body | None, own: Json) -> Json:
    operation: Json = {"summary": _summary(own), "tags": [_tag(path)]}
    if own.get("parameters"):
        operation["parameters"] = [_parameter(one) for one in own["parameters"]]
    if body is not None:
        reference = {"$ref": _SCHEMA_PATH + body.schema}
        operation["requestBody"] = {
            "required": True,
            "content": {body.media_type: {"schema": reference}},
        }
    operation["responses"] = _responses(path, body)
    if path in PUBLIC_PATHS:
        operation["security"] = []
    return operation


def _parameter(found: Json) -> Json:
    schema = {key: value for key, value in found["schema"].items() if key != "title"}
    return {**found, "schema": schema}


def _tag(path: str) -> str:
    if path.startswith("/v1/messages"):
        return "Anthropic"
    if path.startswith("/v1/models") or path in (*OPENAI_PATHS, *audio.PATHS):
        return "OpenAI"
    if path.startswith(_ADMIN_PATHS):
        return "Admin"
    if path.startswith("/api/"):
        return "Ollama"
    return "Operation"


def _responses(path: str, body: _Body | None) -> Json:
    is_text = path.startswith("/metrics") and path != "/metrics/snapshot"
    content: Json = {_TEXT: {"schema": {"type": "string"}}} if is_text else _json_content()
    if path == "/docs":
        content = {"text/html": {"schema": {"type": "string"}}}
    if body is not None and body.stream:
        content[body.stream] = {"schema": {"type": "string"}}
    responses: Json = {"200": {"description": "The response.", "content": content}}
    if body is not None:
        for status, meaning in _REFUSALS.items():
            responses[status] = {"description": meaning, "content": _json_content()}
    elif path not in PUBLIC_PATHS:
        for status in ("401", "403"):
            responses[status] = {"description": _REFUSALS[status], "content": _json_content()}
    return responses


def _json_content() -> Json:
    return {_JSON: {"schema": {"type": "object"}}}


def compact_text() -> str:
    """Return the document as gateways serve it."""
    return json.dumps(document(), ensure_ascii=False, separators=(",", ":")) + "\n"


def text() -> str:
    """Return the document as text."""
    return json.dumps(document(), indent=2) + "\n"


def table() -> str:
    """Return the table of routes for the page."""
    rows = ["| route | API | role | does |", "|---|---|---|---|"]
    for method, path, own in gateway_routes():
        role = "ticket" if path == LOG_PATH else needed_role(method.upper(), path) or "no key"
        rows.append(f"| `{method.upper()} {path}` | {_tag(path)} | {role} | {_summary(own)} |")
    return "\n".join(rows)
