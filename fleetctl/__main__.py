"""The command `fleetctl`: its verbs, each loaded when it is used."""

import click

from fleetctl.config.settling import DEFAULT_PATH
from fleetctl.program import Program
from fleetctl.sections import SECTIONS
from fleetctl.summaries import SUMMARIES
from machinery import environment

# Verb to module and function: a verb's imports are paid for by that verb alone.
_VERBS = {
    "__complete": "fleetctl.completion.verb:answer",
    "annotate": "fleetctl.annotate:annotate",
    "api-resources": "fleetctl.api_resources:api_resources",
    "apply": "fleetctl.apply:apply",
    "backup": "fleetctl.backup:backup",
    "chat": "fleetctl.chat.verb:chat",
    "completion": "fleetctl.completion.verb:completion",
    "config": "fleetctl.config.verb:config",
    "cordon": "fleetctl.cordon:cordon",
    "create": "fleetctl.create.verb:create",
    "delete": "fleetctl.delete:delete",
    "demo": "fleetctl.demo:demo",
    "describe": "fleetctl.describe:describe",
    "diff": "fleetctl.apply:diff",
    "doctor": "fleetctl.doctor.verb:doctor",
    "down": "fleetctl.up:down",
    "drain": "fleetctl.drain:drain",
    "edit": "fleetctl.edit.verb:edit",
    "events": "fleetctl.events:events",
    "explain": "fleetctl.explain:explain",
    "export": "fleetctl.exporting:exporting",
    "fabric": "fleetctl.fabric.verb:fabric",
    "get": "fleetctl.get:get",
    "help": "fleetctl.helping:helping",
    "import": "fleetctl.importing:importing",
    "init-auth": "fleetctl.init_auth:init_auth",
    "label": "fleetctl.label:label",
    "logs": "fleetctl.logs.verb:logs",
    "patch": "fleetctl.patch.verb:patch",
    "plan": "fleetctl.plan:plan",
    "replace": "fleetctl.replace:replace",
    "restore": "fleetctl.restore:restore",
    "resume": "fleetctl.sync:resume",
    "rollout": "fleetctl.rollout.verb:rollout",
    "routes": "fleetctl.routes:routes",
    "scale": "fleetctl.scale:scale",
    "simulate": "fleetctl.simulate:simulate",
    "support-bundle": "fleetctl.support_bundle.verb:support_bundle",
    "suspend": "fleetctl.sync:suspend",
    "sync": "fleetctl.sync:sync",
    "taint": "fleetctl.taint:taint",
    "top": "fleetctl.top.verb:top",
    "uncordon": "fleetctl.cordon:uncordon",
    "up": "fleetctl.up:up",
    "version": "fleetctl.version:version",
    "wait": "fleetctl.wait:wait",
}


def _show_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from machinery.version import version  # noqa: PLC0415 - it looks through what pip installed

        click.echo(f"fleetctl: {version()}")
        context.exit()


@click.group(
    cls=Program,
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
    # Read by `fleetctl.config.settling`, from click's context.
    del context, config
    # What click takes escape codes out of: by itself it knows of no environment.
    click.get_current_context().color = environment.wants_colours()


if __name__ == "__main__":
    main(prog_name="fleetctl")
