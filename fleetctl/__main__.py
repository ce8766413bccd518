"""The command `fleetctl`: its verbs, each loaded when it is used."""

import click

from fleetctl.cli.program import RootGroup
from fleetctl.cli.resolve import DEFAULT_PATH
from fleetctl.cli.summaries import SUMMARIES
from fleetctl.cli.verb_table import SECTIONS
from machinery import environment

# Verb to module and function: a verb's imports are paid for by that verb alone.
_VERBS = {
    "__complete": "fleetctl.verbs.completion:answer",
    "annotate": "fleetctl.verbs.label:annotate",
    "api-resources": "fleetctl.verbs.api_resources:api_resources",
    "apply": "fleetctl.verbs.apply:apply",
    "backup": "fleetctl.verbs.backup:backup",
    "chat": "fleetctl.verbs.chat:chat",
    "completion": "fleetctl.verbs.completion:completion",
    "config": "fleetctl.verbs.config:config",
    "cordon": "fleetctl.verbs.cordon:cordon",
    "create": "fleetctl.verbs.create:create",
    "delete": "fleetctl.verbs.delete:delete",
    "demo": "fleetctl.verbs.demo:demo",
    "describe": "fleetctl.verbs.describe:describe",
    "diff": "fleetctl.verbs.apply:diff",
    "doctor": "fleetctl.verbs.doctor:doctor",
    "down": "fleetctl.verbs.up:down",
    "drain": "fleetctl.verbs.drain:drain",
    "edit": "fleetctl.verbs.edit:edit",
    "events": "fleetctl.verbs.events:events",
    "explain": "fleetctl.verbs.explain:explain",
    "export": "fleetctl.verbs.export:exporting",
    "fabric": "fleetctl.verbs.fabric:fabric",
    "get": "fleetctl.verbs.get:get",
    "help": "fleetctl.verbs.help:show_help",
    "import": "fleetctl.verbs.import_:importing",
    "init-auth": "fleetctl.verbs.init_auth:init_auth",
    "label": "fleetctl.verbs.label:label",
    "logs": "fleetctl.verbs.logs:logs",
    "patch": "fleetctl.verbs.patch:patch",
    "plan": "fleetctl.verbs.plan:plan",
    "replace": "fleetctl.verbs.replace:replace",
    "restore": "fleetctl.verbs.restore:restore",
    "resume": "fleetctl.verbs.sync:resume",
    "rollout": "fleetctl.verbs.rollout:rollout",
    "routes": "fleetctl.verbs.routes:routes",
    "scale": "fleetctl.verbs.scale:scale",
    "simulate": "fleetctl.verbs.simulate:simulate",
    "support-bundle": "fleetctl.verbs.support_bundle:support_bundle",
    "suspend": "fleetctl.verbs.sync:suspend",
    "sync": "fleetctl.verbs.sync:sync",
    "taint": "fleetctl.verbs.taint:taint",
    "top": "fleetctl.verbs.top:top",
    "uncordon": "fleetctl.verbs.cordon:uncordon",
    "up": "fleetctl.verbs.up:up",
    "version": "fleetctl.verbs.version:version",
    "wait": "fleetctl.verbs.wait:wait",
}


def _show_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from machinery.version import version  # noqa: PLC0415 - it looks through what pip installed

        click.echo(f"fleetctl: {version()}")
        context.exit()


@click.group(
    cls=RootGroup,
    verbs=_VERBS,
    summaries=SUMMARIES,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": None},
)
@click.option(
    "--context", envvar="FLEETCTL_CONTEXT", help="Which fleet, by its name in `fleetctl config`."
)
@click.option(
    "--config",
    envvar="FLEETCTL_CONFIG",
    metavar="FILE",
    help=f"Where contexts are written down (else {DEFAULT_PATH}).",
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
    """Declare which models your Macs serve, and see that they do.

    "fleetctl COMMAND --help" says more about each.
    """
    # Read by `fleetctl.cli.resolve`, from click's context.
    del context, config
    # What click takes escape codes out of: by itself it knows of no environment.
    click.get_current_context().color = environment.color_preference()


if __name__ == "__main__":
    main(prog_name="fleetctl")
