"""What fields are for, as `fleetctl explain` shows it: text as kubectl's, or for programs. Pure."""

import textwrap
from collections.abc import Iterator
from typing import Any

import click
import orjson

from fleetctl.explain_schema import Field, Model, find, model_of
from manifests import yamlio
from schemas.meta import API_VERSION

# As kubectl explain folds.
_WIDTH = 80


def explained(what: str, output: str, *, is_recursive: bool) -> str:
    """Return what `KIND.FIELD.FIELD` is for: as text ("table"), "yaml" or "json"."""
    word, *path = what.split(".")
    if path and not all((word, *path)):
        raise click.UsageError(f"{what}: a name is missing beside a dot; write KIND.FIELD.FIELD")
    model = model_of(word)
    field = find(model, tuple(path))
    if output == "table":
        return text(model, field, tuple(path), is_recursive=is_recursive)
    tree = {
        "kind": model.kind,
        "apiVersion": API_VERSION,
        "field": ".".join(path),
        **_tree(model, field, depth=99 if is_recursive else 1),
    }
    if output == "yaml":
        return yamlio.dump(tree)
    return orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode() + "\n"


def text(model: Model, field: Field, path: tuple[str, ...], *, is_recursive: bool) -> str:
    """Return what kubectl explain would say."""
    lines = [f"KIND:       {model.kind}", f"VERSION:    {API_VERSION}", ""]
    if path:
        lines += [f"FIELD: {field.name} <{field.type}>{_needed(field)}", *_facts(field, "  "), ""]
    lines += ["DESCRIPTION:", *_folded(field.description or "<empty>", "    "), ""]
    fields = model.fields(field.schema)
    if fields:
        lines += ["FIELDS:", *_listed(model, fields, 1, is_recursive=is_recursive)]
    return "\n".join(lines).rstrip() + "\n"


def _listed(model: Model, fields: list[Field], depth: int, *, is_recursive: bool) -> Iterator[str]:
    indent = "  " * depth
    for one in sorted(fields, key=lambda field: field.name):
        yield f"{indent}{one.name}\t<{one.type}>{_needed(one)}"
        yield from _facts(one, indent + "  ")
        if is_recursive:
            yield from _listed(model, model.fields(one.schema), depth + 1, is_recursive=True)
        else:
            yield from _folded(one.description, indent + "  ")
            yield ""


def _needed(field: Field) -> str:
    return " -required-" if field.is_required else ""


def _facts(field: Field, indent: str) -> Iterator[str]:
    if field.values:
        yield f"{indent}enum: {', '.join(field.values)}"
    if field.limits:
        yield f"{indent}limits: {field.limits}"
    if field.default:
        yield f"{indent}default: {field.default}"


def _folded(words: str, indent: str) -> list[str]:
    return textwrap.wrap(words, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _tree(model: Model, field: Field, *, depth: int) -> dict[str, Any]:
    """Return a field for programs."""
    fields = model.fields(field.schema) if depth else []
    return {
        "type": field.type,
        "required": field.is_required,
        "description": field.description,
        **({"enum": list(field.values)} if field.values else {}),
        **({"limits": field.limits} if field.limits else {}),
        **({"default": orjson.loads(field.default)} if field.default else {}),
        **(
            {"fields": {f.name: _tree(model, f, depth=depth - 1) for f in fields}} if fields else {}
        ),
    }
