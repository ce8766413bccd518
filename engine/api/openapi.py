"""What every route takes, as an OpenAPI document made from the models and tables that check requests.

A body that fits may still be refused: some rules need the tokenizer, or join two parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.api import web
from engine.openai import parameters, responses, tokenization
from engine.openai.embeddings import EmbeddingBody, accepted_parameters
from engine.openai.parameters import EndpointParameters
from engine.openai.request_body import ChatBody, CompletionBody
from engine.openai.responses import ResponsesBody
from engine.openai.tokenization import TokenizeBody

Json: TypeAlias = dict[str, Any]

_SCHEMA_PATH = "#/components/schemas/"
_STREAM, _JSON = "text/event-stream", "application/json"
_TEXT = "text/plain"
# Why a request for the model may be refused; each in OpenAI's envelope.
_REFUSALS = {
    "400": "The request is wrong, or asks for something this engine does not do.",
    "404": "Another model was asked for.",
    "409": "An answer is to be continued whose prompt differs here.",
    "413": "The body is too large.",
    "429": "As many wait already as may.",
    "500": "The engine failed.",
    "503": "Not ready, or shutting down; another replica can serve.",
    "504": "The client's own deadline passed.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteBody:
    """What one route takes."""

    body: type[BaseModel]
    dialect: EndpointParameters
    is_streamable: bool = True
    is_resumable: bool = False


def route_bodies() -> Mapping[str, RouteBody]:
    """Return what each route takes that takes a body, by its path."""
    chat, completion = parameters.chat_parameters(), parameters.completion_parameters()
    return {
        "/v1/chat/completions": RouteBody(body=ChatBody, dialect=chat, is_resumable=True),
        "/v1/completions": RouteBody(body=CompletionBody, dialect=completion, is_resumable=True),
        "/v1/responses": RouteBody(body=ResponsesBody, dialect=responses.accepted_parameters()),
        "/v1/embeddings": RouteBody(
            body=EmbeddingBody, dialect=accepted_parameters(), is_streamable=False
        ),
        "/tokenize": RouteBody(
            body=TokenizeBody, dialect=tokenization.accepted_parameters(), is_streamable=False
        ),
    }


def document_route(others: Sequence[Route], *, version: str) -> Route:
    """Return the route that shows the document of all, itself included."""

    async def show(_: Request) -> Response:
        """Describe every route."""
        return web.json_response(build_document([*others, own], version=version))

    own = Route("/openapi.json", show, methods=["GET"])
    return own


def build_document(routes: Iterable[Route], *, version: str) -> Json:
    """Return the document of an application's routes."""
    taken = route_bodies()
    models: list[Any] = [(one.body, "validation") for one in taken.values()]
    _, found = models_json_schema(models, ref_template=_SCHEMA_PATH + "{model}")
    schemas: Json = found["$defs"]
    for one in taken.values():
        schemas[one.body.__name__] = _body_schema(schemas[one.body.__name__], one.dialect)
    paths: Json = {}
    for route in routes:
        summary = (getattr(route.endpoint, "__doc__", None) or "").partition("\n")[0]
        operation = _operation(taken.get(route.path), summary)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx-fleet engine", "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas, "Refusal": _refusal_schema()}},
    }


def _body_schema(schema: Json, dialect: EndpointParameters) -> Json:
    """Return a body's schema with the names that its model does not know, and no others."""
    own = {name: one for name, one in schema["properties"].items() if name in dialect.names}
    limited = {
        name: {"enum": [*only.values, None], "description": only.why}
        for name, only in dialect.limited.items()
    }
    return {**schema, "properties": {**own, **limited}, "additionalProperties": False}


def _operation(taken: RouteBody | None, summary: str) -> Json:
    if taken is None:
        answers: Json = {
            _JSON: {"schema": {"type": "object"}},
            _TEXT: {"schema": {"type": "string"}},
        }
        refusals = {"503": _refusal_response("It does not take requests now.")}
        return {"summary": summary, "responses": {"200": _success_response(answers), **refusals}}
    content: Json = {_JSON: {"schema": {"type": "object"}}}
    if taken.is_streamable:
        content[_STREAM] = {"schema": {"type": "string"}}
    own: list[Json] = [_header(web.TIMEOUT, {"type": "number", "exclusiveMinimum": 0})]
    if taken.is_resumable:
        own.append(_header(web.RESUMABLE, {"enum": ["0", "1"]}))
    body = {_JSON: {"schema": {"$ref": _SCHEMA_PATH + taken.body.__name__}}}
    refusals = {status: _refusal_response(why) for status, why in _REFUSALS.items()}
    return {
        "summary": summary,
        "parameters": own,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": _success_response(content), **refusals},
    }


def _header(name: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _success_response(content: Json) -> Json:
    return {"description": "The answer.", "content": content}


def _refusal_response(why: str) -> Json:
    return {"description": why, "content": {_JSON: {"schema": {"$ref": _SCHEMA_PATH + "Refusal"}}}}


def _refusal_schema() -> Json:
    word = {"type": ["string", "null"]}
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": word, "param": word, "code": word},
        "additionalProperties": False,
    }
    return {"type": "object", "required": ["error"], "properties": {"error": error}}
