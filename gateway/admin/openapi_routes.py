"""`/openapi.json` and `/docs`: the API of gateways, from the document that `make docs` generates.

It holds nothing of the fleet. Its bodies are those that engines check, which a gateway does not import.
"""

import json
from functools import cache
from pathlib import Path
from typing import Final

from fastapi import Response

from machinery.openapi_page import docs_page

DOCUMENT: Final = Path(__file__).parent / "openapi.json"


async def openapi() -> Response:
    """Return the OpenAPI document of the gateway."""
    return Response(_document(), media_type="application/json")


async def docs() -> Response:
    """Return the documentation of all routes as a page."""
    return Response(_page(), media_type="text/html; charset=utf-8")


@cache
def _document() -> bytes:
    return DOCUMENT.read_bytes()


@cache
def _page() -> bytes:
    return docs_page(json.loads(_document())).encode()
