"""An OpenAPI document as one HTML page: no script, and nothing from elsewhere."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: API</title>'
    '<meta name="viewport" content="width=device-width">{style}</head><body><main><h1>{title} {version}</h1>'
    '<p>Its schema is <a href="/openapi.json">/openapi.json</a>.</p>'
)
_TAIL = "</main></body></html>"


def docs_page(schema: Mapping[str, Any], *, stylesheet: str = "") -> str:
    """Return the page of an OpenAPI document. `stylesheet`: a path of the same process. Pure."""
    info = schema["info"]
    style = f'<link rel="stylesheet" href="{escape(stylesheet)}">' if stylesheet else ""
    head = _HEAD.format(title=escape(info["title"]), version=escape(info["version"]), style=style)
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
