"""`/docs`: the routes of this process as one HTML page, from its OpenAPI document. No script, nothing from elsewhere."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response

_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: API</title>'
    '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/static/dashboard.css">'
    "</head><body><main><h1>{title} {version}</h1>"
    '<p>Its schema is <a href="/openapi.json">/openapi.json</a>.</p>'
)
_TAIL = "</main></body></html>"


def add_docs(app: FastAPI) -> None:
    """Register the page."""

    async def docs(request: Request) -> Response:
        """Return the documentation of all routes as a page."""
        text = docs_page(request.app.openapi())
        return Response(text, media_type="text/html; charset=utf-8")

    app.add_api_route("/docs", docs, methods=["GET"])


def docs_page(schema: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document. Pure."""
    info = schema["info"]
    head = _HEAD.format(title=escape(info["title"]), version=escape(info["version"]))
    return head + "".join(_routes(schema["paths"])) + _TAIL


def _routes(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in sorted(paths.items()):
        for method, operation in operations.items():
            words = operation.get("description") or operation.get("summary", "")
            yield f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2><p>{escape(words)}</p>"
            rows = "".join(map(_parameter, operation.get("parameters", ())))
            if rows:
                head = "<tr><th>parameter</th><th>in</th><th>type</th><th>default</th></tr>"
                yield f"<table>{head}{rows}</table>"


def _parameter(one: Mapping[str, Any]) -> str:
    schema = one.get("schema", {})
    kind = str(schema.get("type", "any"))
    limits = [
        f"{word} {schema[name]}"
        for name, word in (
            *(("minimum", "at least"), ("maximum", "at most")),
            ("maxLength", "up to characters:"),
        )
        if name in schema
    ]
    default = "required" if one.get("required") else str(schema.get("default", ""))
    cells = (one["name"], one["in"], ", ".join((kind, *limits)), default)
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
