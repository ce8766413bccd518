"""The OpenAPI document of the gateway: every route that the gateway answers is in it, and it is a valid document."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from docs import gateway_openapi
from gateway.admin.request_stream import STREAM_PATH
from gateway.apis import registry
from gateway.apis.openai import PATHS
from gateway.auth.roles import PUBLIC_PATHS
from machinery.version import version

DOCUMENT = Path(__file__).parent.parent / "docs" / "api" / "openapi.json"
MODEL_PATHS = {*PATHS, *registry.PATHS}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DOCUMENT.read_text())
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for path, methods in document["paths"].items():
        for method in methods:
            yield method.upper(), path


def served() -> Iterator[tuple[str, str]]:
    """Yield what the gateway's request handler and its application answer."""
    yield from (("POST", path) for path in MODEL_PATHS)
    pending: list[Any] = list(gateway_openapi.make_gateway_app().routes)
    while pending:
        route = pending.pop()
        if isinstance(route, APIRoute):
            methods = set(route.methods or ()) - {"HEAD"}
            if route.path not in MODEL_PATHS and not route.path.endswith("models/"):
                yield from ((method, route.path_format) for method in methods)
        else:
            inner = getattr(route, "original_router", None) or getattr(route, "router", None)
            pending.extend(inner.routes if inner is not None else ())


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(document).validate()
    assert document["info"]["version"] == version()


def test_every_route_of_the_gateway_is_in_the_document(document: dict[str, Any]) -> None:
    assert set(operations(document)) == set(served())
    assert len(set(served())) > 30


def test_references_lead_to_schemas(document: dict[str, Any]) -> None:
    names = document["components"]["schemas"]
    for part in json.dumps(document).split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in names


def test_the_application_answers_each_documented_route(document: dict[str, Any]) -> None:
    client = TestClient(gateway_openapi.make_gateway_app(), raise_server_exceptions=False)
    for path in PUBLIC_PATHS:
        assert document["paths"][path]["get"]["security"] == []
    for method, path in operations(document):
        # A stream has no end, and this client waits for it.
        if path not in MODEL_PATHS and "{" not in path and path != STREAM_PATH:
            answer = client.request(method, path)
            is_unknown = answer.status_code == 404 and "Not Found" in answer.text
            assert not is_unknown, f"{method} {path}"


def test_bodies_of_the_document_are_those_that_are_checked(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for path in MODEL_PATHS:
        (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        assert "model" in schema["properties"], path


def test_the_gateway_serves_the_document_and_a_page_of_it(document: dict[str, Any]) -> None:
    client = TestClient(gateway_openapi.make_gateway_app())
    assert client.get("/openapi.json").json() == document
    page = client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in document["paths"]:
        assert f" {path}</code>" in page.text
    # It loads nothing, from here or from elsewhere.
    assert "<script" not in page.text
    assert set(re.findall(r'(?:src|href)="([^"]+)"', page.text)) == {"/openapi.json"}
