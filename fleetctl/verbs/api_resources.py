"""`fleetctl api-resources`: lists the kinds of objects, and the verbs that apply to each."""

import click

from fleetctl.cli.arguments import output_option
from fleetctl.output import printers
from schemas.kinds import KINDS, Kind
from store.object_trees import API_VERSION

_SEEN = ("get", "list", "watch")
_WRITTEN = ("apply", "create", "edit", "patch", "delete")
# Replicas are written by the fleet; a deleted one is replaced.
_DELETED = ("Replica",)
# API keys are not a kind of the API, because secrets do not belong in manifests. Verbs accept them like a kind.
_API_KEYS = ("apikeys", "ak", "", "ApiKey", "get,list,create,rotate,delete")


@click.command("api-resources")
@output_option("table", "wide", "name")
@click.option("--no-headers", is_flag=True, help="Do not print column titles.")
def api_resources(output: str, no_headers: bool) -> None:
    """List the kinds of objects with their short names."""
    rows = sorted([*_kinds(), _API_KEYS])
    if output == "name":
        click.echo("\n".join(row[0] for row in rows))
        return
    titles = ("NAME", "SHORTNAMES", "APIVERSION", "KIND", "VERBS")
    shown = 5 if output == "wide" else 4
    cut = [row[:shown] for row in rows]
    click.echo(printers.align_columns(cut, () if no_headers else titles[:shown]))


def _kinds() -> list[tuple[str, str, str, str, str]]:
    return [
        (
            kind.plural,
            kind.short,
            API_VERSION,
            kind.name,
            ",".join((*_SEEN, *_changed(kind))),
        )
        for kind in KINDS
    ]


def _changed(kind: Kind) -> tuple[str, ...]:
    """Return the verbs that change objects of the kind."""
    if kind.written_by_users:
        return _WRITTEN
    return ("delete",) if kind.name in _DELETED else ()
