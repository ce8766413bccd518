"""Entry point of the command `fleetctl`."""

import click

from fleetctl.cli.program import RootGroup
from fleetctl.cli.resolve import DEFAULT_PATH
from fleetctl.cli.summaries import SUMMARIES
from fleetctl.cli.verb_table import SECTIONS, VERBS
from machinery import environment
from machinery.process_secrets import disable_core_dumps


def _show_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from machinery.version import version_with_commit  # noqa: PLC0415 - reads metadata

        click.echo(f"fleetctl: {version_with_commit()}")
        context.exit()


@click.group(
    cls=RootGroup,
    verbs=VERBS,
    summaries=SUMMARIES,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": None},
)
@click.option(
    "--context",
    envvar="FLEETCTL_CONTEXT",
    help="Context to use: the name of a fleet in `fleetctl config`.",
)
@click.option(
    "--config",
    envvar="FLEETCTL_CONFIG",
    metavar="FILE",
    help=f"Configuration file with the contexts (default: {DEFAULT_PATH}).",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def main(context: str | None, config: str | None) -> None:
    """Declare which models your Macs serve, and keep them running.

    Run "fleetctl COMMAND --help" for details about a command.
    """
    disable_core_dumps()
    # `fleetctl.cli.resolve` reads both from click's context.
    del context, config
    # click strips colours according to this; it does not read the environment itself.
    click.get_current_context().color = environment.color_preference()


if __name__ == "__main__":
    main(prog_name="fleetctl")
