"""`fleetctl explain`: what a field of a kind is for, or what placement thinks of the nodes for a deployment."""

from typing import Any

import click

from fleetctl.connect import run, store_options

_HELP = """Say what a field is for: its type, its values, what counts where it is left out.

\b
  fleetctl explain modeldeployment
  fleetctl explain md.spec.placement
  fleetctl explain shardgroup.spec --recursive

And for a deployment: what placement thinks of every node for one more replica of it, and why.

\b
  fleetctl explain placement qwen
  fleetctl explain placement qwen -o json

Nodes that fit come first, the best of them first: the reconciler would take that one. Each score is 0 to 100, and
counts as much as the number beside its name (spec.placement.profile and weights). Works without a reconciler.
"""


@click.command(help=_HELP)
@click.argument("what", metavar="KIND[.FIELD...] | placement")
@click.argument("name", nargs=-1, metavar="[NAME]")
@click.option("--recursive", is_flag=True, help="Show the fields of fields, too.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "yaml", "json"]),
    default="table",
    show_default=True,
)
@store_options
def explain(what: str, name: tuple[str, ...], recursive: bool, output: str, **options: Any) -> None:
    """Say what a field is for, or what placement thinks of the nodes for a deployment."""
    if what != "placement":
        if name:
            raise click.UsageError(
                f"fields follow the kind after a dot: {what}.{'.'.join(name)}; only placement takes a name"
            )
        from fleetctl import explain_fields  # noqa: PLC0415 - either it or placement is needed

        click.echo(explain_fields.explained(what, output, is_recursive=recursive), nl=False)
        return
    if recursive:
        raise click.UsageError("--recursive is for fields; leave it out with placement")
    if not name:
        raise click.UsageError("the placement of which deployment? Write: explain placement NAME")
    from fleetctl import explain_placement  # noqa: PLC0415 - it brings the whole planner
    from fleetctl.rollout import named  # noqa: PLC0415 - as above

    one = named.one_name(name)
    click.echo(run(explain_placement.explained(one, output, options)), nl=False)
