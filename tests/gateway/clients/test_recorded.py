"""Requests of programs that are no library, replayed: each is answered by a real engine, in the form that they read.

`recorded/` has one file for each shape, with its origin; a body of null is a GET. docs/clients.md says how to set these programs up.
"""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.gateway_world import Running

pytestmark = pytest.mark.mlx
FOLDER = Path(__file__).parent / "recorded"
PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
SHAPES = sorted(FOLDER.glob("*.json"))
ORIGINS = {
    "Recorded;": "- Recorded from the running program",
    "From Zed's source:": "- Written after the program's source",
    "From Cline's source:": "- Composed after the program's source",
    "Composed by hand": "- Composed by hand",
}
"""The beginning of an origin, and of its line on the page."""


def read(path: Path) -> dict[str, Any]:
    shape: dict[str, Any] = json.loads(path.read_text())
    assert set(shape) == {"program", "origin", "path", "headers", "body"}
    return shape


# They ask for as many tokens as the context holds, which random weights give.
LONG_ANSWERS = ("claude_code", "open_webui_title")


@pytest.mark.ci
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, id=path.stem, marks=[pytest.mark.ci] if path.stem in LONG_ANSWERS else []
        )
        for path in SHAPES
    ],
)
async def test_a_request_of_a_program_is_answered(
    gateway: Running, http: aiohttp.ClientSession, path: Path
) -> None:
    shape = read(path)
    url, body = gateway.url + shape["path"], shape["body"]
    method = "GET" if body is None else "POST"
    async with http.request(method, url, json=body, headers=shape["headers"]) as response:
        text = (await response.read()).decode()
        assert response.status == 200, text
    if body is None:
        check_list(shape["path"], json.loads(text))
    elif body["stream"]:
        check_stream(shape["path"], text)
    else:
        check_answer(shape["path"], json.loads(text))


def check_list(path: str, answer: Any) -> None:
    """Check the fields that the programs read of lists of models."""
    if path == "/v1/models":
        assert [model["id"] for model in answer["data"]] == ["tiny"]
        return
    (model,) = answer["models"]
    assert {"name", "model", "size", "digest", "details"} <= set(model)
    assert {"format", "family", "parameter_size", "quantization_level"} <= set(model["details"])


def check_answer(path: str, answer: Any) -> None:
    """Check that a whole answer has an end, and text at the place where the programs read it."""
    if path.startswith("/api/"):
        assert answer["done"]
        assert isinstance(answer["message"]["content"], str)
        return
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    assert isinstance(choice["message"]["content"], str)


def check_stream(path: str, text: str) -> None:
    """Check that a stream ends, and that each part has the fields without which programs drop it."""
    if path.startswith("/v1/messages"):
        assert "event: message_stop" in text
        return
    if path.startswith("/api/"):
        parts = [json.loads(line) for line in text.splitlines()]
        for part in parts:
            assert {"model", "created_at", "done"} <= set(part)
            assert part["message"]["role"] == "assistant"
            assert isinstance(part["message"]["content"], str)
        assert parts[-1]["done"]
        return
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    if path == "/v1/responses":
        assert json.loads(events[-1])["type"] in ("response.completed", "response.incomplete")
        return
    assert events[-1] == "[DONE]"
    for event in map(json.loads, events[:-1]):
        assert isinstance(event["choices"], list)
        if event.get("usage"):
            assert {"prompt_tokens", "completion_tokens", "total_tokens"} <= set(event["usage"])


def test_the_page_names_each_program() -> None:
    page = PAGE.read_text()
    for path in SHAPES:
        assert name_of(read(path)) in page, path.stem


def test_the_page_says_where_requests_come_from() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("- ")]
    for path in SHAPES:
        shape = read(path)
        (start,) = [ours for theirs, ours in ORIGINS.items() if shape["origin"].startswith(theirs)]
        (line,) = [line for line in lines if line.startswith(start)]
        assert name_of(shape) in line, path.stem


def name_of(shape: dict[str, Any]) -> str:
    """Return the name of a program without its version and the kind of request."""
    name: str = shape["program"].split(" (")[0].rstrip("0123456789. ")
    return name
