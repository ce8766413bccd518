"""`fleetctl version`: the versions of fleetctl and of every part of the fleet, with warnings about version skew."""

from typing import Any

import click
import orjson

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.kubectl_hints import unsupported_flag
from fleetctl.fleets import version_skew
from fleetctl.fleets.version_skew import ComponentVersion
from machinery.version import commit, version_with_commit
from machinery.version import version as fleet_version
from manifests.yaml import parser
from store.errors import StoreError


@click.command()
@click.option("--client", is_flag=True, help="Show only the version of fleetctl.")
@click.option("-o", "--output", type=click.Choice(["json", "yaml"]), help="Output format.")
@unsupported_flag("the output is short; use -o json in scripts", "--short")
@store_options
def version(client: bool, output: str | None, **options: Any) -> None:
    """Show the versions of fleetctl, etcd, the reconciler, gateways and node agents.

    Warns about versions that are more than one minor version apart from the reconciler.
    """
    if client:
        tree = {"fleetctl": fleet_version()} | ({"commit": commit()} if commit() else {})
        text = _text(tree, output) if output else f"fleetctl: {version_with_commit()}\n"
        click.echo(text, nl=False)
        return
    run(_print_fleet_versions(output, options))


async def _print_fleet_versions(output: str | None, options: dict[str, Any]) -> None:
    ours = ComponentVersion(part="fleetctl", version=fleet_version())
    try:
        async with open_store(options) as transport:
            found = await version_skew.read_versions(transport, ours)
    except StoreError as error:
        if not output:
            click.echo(f"fleetctl: {version_with_commit()}")
        click.echo(f"etcd: no answer ({error})", err=True)
        raise click.exceptions.Exit(1) from error
    warned = version_skew.warnings(found)
    if output:
        click.echo(_text(version_skew.tree(found, warned), output), nl=False)
    else:
        _, *others = version_skew.lines(found)
        click.echo("\n".join([f"fleetctl: {version_with_commit()}", *others]))
    for line in warned:
        click.echo(f"warning: {line}", err=True)


def _text(tree: dict[str, Any], output: str) -> str:
    if output == "yaml":
        return parser.dump(tree)
    return orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode() + "\n"
