"""Requests of programs that are no library, replayed: each is answered by a real engine, whole or as a stream that ends.

`recorded/` has one file for each shape, with its origin. docs/clients.md says how to set these programs up.
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


def read(path: Path) -> dict[str, Any]:
    shape: dict[str, Any] = json.loads(path.read_text())
    assert set(shape) == {"program", "origin", "path", "headers", "body"}
    return shape


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
async def test_a_request_of_a_program_is_answered(
    gateway: Running, http: aiohttp.ClientSession, path: Path
) -> None:
    shape = read(path)
    url, body = gateway.url + shape["path"], shape["body"]
    async with http.post(url, json=body, headers=shape["headers"]) as response:
        text = (await response.read()).decode()
        assert response.status == 200, text
    if not body["stream"]:
        assert json.loads(text)["choices"][0]["finish_reason"] in ("stop", "length")
    elif shape["path"].startswith("/api/"):
        assert json.loads(text.splitlines()[-1])["done"]
    elif shape["path"].startswith("/v1/messages"):
        assert "event: message_stop" in text
    else:
        assert text.rstrip().endswith("data: [DONE]")


def test_the_page_names_each_program() -> None:
    page = PAGE.read_text()
    for path in SHAPES:
        assert read(path)["program"].split(" (")[0].rstrip("0123456789. ") in page, path.stem


def test_the_page_says_which_requests_were_recorded() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("- ")]
    (recorded,) = [line for line in lines if line.startswith("- Recorded from the running program")]
    (composed,) = [line for line in lines if line.startswith("- Composed by hand")]
    for path in SHAPES:
        shape = read(path)
        is_recorded = shape["origin"].startswith("Recorded;")
        assert is_recorded or shape["origin"].startswith("Composed by hand"), path.stem
        name = shape["program"].split(" (")[0].rstrip("0123456789. ")
        assert name in (recorded if is_recorded else composed), path.stem
