"""`/docs`: a page with every route of the schema, which loads nothing and cannot be broken by words in it."""

import re

import pytest

from dashboard.assets import Assets
from machinery.openapi_page import docs_page
from store.memory import MemoryTransport
from store.port import Transport
from tests.support.dashboards import CLOCK, running_dashboard


@pytest.fixture
def memory() -> MemoryTransport:
    return MemoryTransport(CLOCK)


async def test_the_page_has_every_route(memory: Transport) -> None:
    async with running_dashboard(memory) as it:
        schema = await it.get("/openapi.json")
        async with it.http.get(f"{it.url}/docs") as response:
            assert response.status == 200
            assert response.headers["content-type"] == "text/html; charset=utf-8"
            text = await response.text()
        for path in schema["paths"]:
            assert f" {path}</code>" in text
        assert "/api/v1/objects/{kind}/{name}" in schema["paths"]
        assert set(re.findall(r'(?:src|href)="([^"]+)"', text)) == {
            "/openapi.json",
            Assets.load().path_of("dashboard.css"),
        }
        assert "<script" not in text


def test_words_are_escaped() -> None:
    operation = {"description": "<b>", "parameters": [{"name": "<i>", "in": "query"}]}
    text = docs_page(
        {"info": {"title": "<u>", "version": "1"}, "paths": {"/<s>": {"get": operation}}}
    )
    assert not re.search(r"<(?:b|i|u|s)>", text)
