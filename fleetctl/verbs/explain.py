"""`fleetctl explain`: describes the fields of a kind, and the placement of a deployment."""

import textwrap
from collections.abc import Iterator
from typing import Any

import click
import orjson

from fleetctl.cli.arguments import output_option
from fleetctl.cli.connect import run, store_options
from fleetctl.cli.documents import tree_text
from fleetctl.objects.kind_schema import FieldSchema, KindSchema, find_field, schema_of
from schemas.meta import API_VERSION

# As kubectl explain folds.
_WIDTH = 80


def explain_field(what: str, output: str, *, is_recursive: bool) -> str:
    """Return the description of `KIND.FIELD.FIELD` as text ("table"), "yaml" or "json"."""
    word, *path = what.split(".")
    if path and not all((word, *path)):
        raise click.UsageError(f"{what}: a name is missing next to a dot; write KIND.FIELD.FIELD")
    model = schema_of(word)
    field = find_field(model, tuple(path))
    if output == "table":
        return field_text(model, field, tuple(path), is_recursive=is_recursive)
    tree = {
        "kind": model.kind,
        "apiVersion": API_VERSION,
        "field": ".".join(path),
        **_field_tree(model, field, depth=99 if is_recursive else 1),
    }
    return tree_text(tree, output)


def field_text(
    model: KindSchema, field: FieldSchema, path: tuple[str, ...], *, is_recursive: bool
) -> str:
    """Return the description as kubectl explain prints it."""
    lines = [f"KIND:       {model.kind}", f"VERSION:    {API_VERSION}", ""]
    if path:
        lines += [
            f"FIELD: {field.name} <{field.type}>{_required_mark(field)}",
            *_facts(field, "  "),
            "",
        ]
    lines += ["DESCRIPTION:", *_wrap(field.description or "<empty>", "    "), ""]
    fields = model.fields(field.schema)
    if fields:
        lines += ["FIELDS:", *_field_lines(model, fields, 1, is_recursive=is_recursive)]
    return "\n".join(lines).rstrip() + "\n"


def _field_lines(
    model: KindSchema, fields: list[FieldSchema], depth: int, *, is_recursive: bool
) -> Iterator[str]:
    indent = "  " * depth
    for schema in sorted(fields, key=lambda field: field.name):
        yield f"{indent}{schema.name}\t<{schema.type}>{_required_mark(schema)}"
        yield from _facts(schema, indent + "  ")
        if is_recursive:
            yield from _field_lines(
                model, model.fields(schema.schema), depth + 1, is_recursive=True
            )
        else:
            yield from _wrap(schema.description, indent + "  ")
            yield ""


def _required_mark(field: FieldSchema) -> str:
    return " -required-" if field.is_required else ""


def _facts(field: FieldSchema, indent: str) -> Iterator[str]:
    if field.values:
        yield f"{indent}enum: {', '.join(field.values)}"
    if field.limits:
        yield f"{indent}limits: {field.limits}"
    if field.default:
        yield f"{indent}default: {field.default}"


def _wrap(words: str, indent: str) -> list[str]:
    return textwrap.wrap(words, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _field_tree(model: KindSchema, field: FieldSchema, *, depth: int) -> dict[str, Any]:
    """Return a field as a tree."""
    fields = model.fields(field.schema) if depth else []
    return {
        "type": field.type,
        "required": field.is_required,
        "description": field.description,
        **({"enum": list(field.values)} if field.values else {}),
        **({"limits": field.limits} if field.limits else {}),
        **({"default": orjson.loads(field.default)} if field.default else {}),
        **(
            {"fields": {f.name: _field_tree(model, f, depth=depth - 1) for f in fields}}
            if fields
            else {}
        ),
    }


_HELP = """Describe a field of a kind: its type, allowed values and default.

\b
  fleetctl explain modeldeployment
  fleetctl explain md.spec.placement
  fleetctl explain shardgroup.spec --recursive

With `placement`, explain for a deployment which nodes fit one more replica, and why others do not.

\b
  fleetctl explain placement qwen
  fleetctl explain placement qwen -o json

Nodes that fit are listed first, the best one on top: the reconciler would choose it. Each score is 0 to 100 and is
multiplied by the weight in its title (spec.placement.profile and weights). A running reconciler is not needed.
"""


@click.command(help=_HELP, short_help="Describe a field of a kind, or why a replica does not fit.")
@click.argument("what", metavar="KIND[.FIELD...] | placement")
@click.argument("name", nargs=-1, metavar="[NAME]")
@click.option("--recursive", is_flag=True, help="Show all nested fields.")
@output_option("table", "yaml", "json")
@store_options
def explain(what: str, name: tuple[str, ...], recursive: bool, output: str, **options: Any) -> None:
    """Describe a field of a kind, or the placement of a deployment."""
    if what != "placement":
        if name:
            raise click.UsageError(
                f"write fields after a dot: {what}.{'.'.join(name)}; only `placement` takes a name"
            )

        click.echo(explain_field(what, output, is_recursive=recursive), nl=False)
        return
    if recursive:
        raise click.UsageError("--recursive applies to fields; remove it with `placement`")
    if not name:
        raise click.UsageError("name a deployment: explain placement NAME")
    from fleetctl.objects import deployments  # noqa: PLC0415 - as above
    from fleetctl.verbs import explain_placement  # noqa: PLC0415 - it brings the whole planner

    one = deployments.parse_name(name)
    click.echo(run(explain_placement.placement_report(one, output, options)), nl=False)
