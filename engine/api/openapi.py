"""OpenAPI document of all routes, made from the models and tables that check requests.

A body that matches may still be refused: some rules need the tokenizer, or combine two parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.api import web
from engine.openai import audio, embeddings, request_body, responses, similarity, tokenization
from engine.openai.parameters import EndpointParameters
from machinery import multipart
from schemas.wire import headers

Json: TypeAlias = dict[str, Any]

_SCHEMA_PATH = "#/components/schemas/"
_STREAM, _JSON = "text/event-stream", "application/json"
_TEXT = "text/plain"
# The reasons why a request for the model may be refused; each has OpenAI's error envelope.
_REFUSALS = {
    "400": "The request is wrong, or asks for something that this engine does not support.",
    "404": "The engine does not serve this model.",
    "409": "The answer to continue has another prompt.",
    "413": "The body is too large.",
    "429": "The queue is full.",
    "500": "The engine failed.",
    "503": "Not ready, or shutting down; another replica can serve.",
    "504": "The deadline of the client passed.",
}


@dataclass(frozen=True, slots=True)
class RouteBody:
    """Body of one route."""

    accepted: EndpointParameters
    _: KW_ONLY
    media_type: str = _JSON
    is_streamable: bool = True
    is_resumable: bool = False


def route_bodies() -> Mapping[str, RouteBody]:
    """Return the bodies of all routes that have one, by path."""
    return {
        "/v1/chat/completions": RouteBody(request_body.CHAT_PARAMETERS, is_resumable=True),
        "/v1/completions": RouteBody(request_body.COMPLETION_PARAMETERS, is_resumable=True),
        "/v1/responses": RouteBody(responses.PARAMETERS, is_resumable=True),
        "/v1/embeddings": RouteBody(embeddings.PARAMETERS, is_streamable=False),
        "/v1/score": RouteBody(similarity.SCORE_PARAMETERS, is_streamable=False),
        "/v1/rerank": RouteBody(similarity.RERANK_PARAMETERS, is_streamable=False),
        "/tokenize": RouteBody(tokenization.TOKENIZE_PARAMETERS, is_streamable=False),
        "/detokenize": RouteBody(tokenization.DETOKENIZE_PARAMETERS, is_streamable=False),
        "/v1/audio/transcriptions": RouteBody(
            audio.TRANSCRIPTION_PARAMETERS, media_type=multipart.MEDIA_TYPE
        ),
        "/v1/audio/translations": RouteBody(
            audio.TRANSLATION_PARAMETERS, media_type=multipart.MEDIA_TYPE, is_streamable=False
        ),
        "/v1/audio/speech": RouteBody(audio.SPEECH_PARAMETERS),
    }


def document_route(others: Sequence[Route], *, version: str) -> Route:
    """Return the route that serves the document, which includes the route itself."""

    async def show(_: Request) -> Response:
        """Describe every route."""
        return web.json_response(build_document([*others, own], version=version))

    own = Route("/openapi.json", show, methods=["GET"])
    return own


def build_document(routes: Iterable[Route], *, version: str) -> Json:
    """Return the document of an application's routes."""
    bodies = route_bodies()
    models: list[Any] = [(body.accepted.model, "validation") for body in bodies.values()]
    _, definitions = models_json_schema(models, ref_template=_SCHEMA_PATH + "{model}")
    schemas: Json = definitions["$defs"]
    for body in bodies.values():
        name = body.accepted.model.__name__
        schemas[name] = _body_schema(schemas[name], body.accepted)
    paths: Json = {}
    for route in routes:
        summary = (getattr(route.endpoint, "__doc__", None) or "").partition("\n")[0]
        operation = _operation(bodies.get(route.path), summary)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx-fleet engine", "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas, "Refusal": _refusal_schema()}},
    }


def _body_schema(schema: Json, accepted: EndpointParameters) -> Json:
    """Return the schema of a body with its limited parameters, and without unknown ones."""
    limited = {
        name: {"enum": [*parameter.values, None], "description": parameter.reason}
        for name, parameter in accepted.limited.items()
    }
    properties = {**schema["properties"], **limited}
    return {**schema, "properties": properties, "additionalProperties": False}


def _operation(body: RouteBody | None, summary: str) -> Json:
    if body is None:
        probe: Json = {
            _JSON: {"schema": {"type": "object"}},
            _TEXT: {"schema": {"type": "string"}},
        }
        refusals = {"503": _refusal_response("The engine does not take requests now.")}
        return {"summary": summary, "responses": {"200": _success_response(probe), **refusals}}
    content: Json = {_JSON: {"schema": {"type": "object"}}}
    if body.is_streamable:
        content[_STREAM] = {"schema": {"type": "string"}}
    timeout = {"type": "number", "exclusiveMinimum": 0}
    header_parameters: list[Json] = [_header(headers.REQUEST_TIMEOUT, timeout)]
    if body.is_resumable:
        header_parameters.append(_header(headers.RESUMABLE, {"enum": ["0", "1"]}))
    schema = {body.media_type: {"schema": {"$ref": _SCHEMA_PATH + body.accepted.model.__name__}}}
    refusals = {status: _refusal_response(reason) for status, reason in _REFUSALS.items()}
    return {
        "summary": summary,
        "parameters": header_parameters,
        "requestBody": {"required": True, "content": schema},
        "responses": {"200": _success_response(content), **refusals},
    }


def _header(name: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _success_response(content: Json) -> Json:
    return {"description": "The response.", "content": content}


def _refusal_response(reason: str) -> Json:
    content = {_JSON: {"schema": {"$ref": _SCHEMA_PATH + "Refusal"}}}
    return {"description": reason, "content": content}


def _refusal_schema() -> Json:
    text = {"type": ["string", "null"]}
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": text, "param": text, "code": text},
        "additionalProperties": False,
    }
    return {"type": "object", "required": ["error"], "properties": {"error": error}}
