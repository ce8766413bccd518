"""The command `fleetctl`: its verbs, each loaded when it is used."""

import click

from fleetctl.lazy import LazyGroup
from machinery.version import version

# Verb to module and function: a verb's imports are paid for by that verb alone.
_VERBS = {
    "apply": "fleetctl.apply:apply",
    "backup": "fleetctl.backup:backup",
    "cordon": "fleetctl.cordon:cordon",
    "create": "fleetctl.create:create",
    "delete": "fleetctl.delete:delete",
    "demo": "fleetctl.demo:demo",
    "describe": "fleetctl.describe:describe",
    "diff": "fleetctl.apply:diff",
    "down": "fleetctl.up:down",
    "drain": "fleetctl.drain:drain",
    "explain": "fleetctl.explain:explain",
    "export": "fleetctl.exporting:exporting",
    "fabric": "fleetctl.fabric.verb:fabric",
    "get": "fleetctl.get:get",
    "import": "fleetctl.importing:importing",
    "init-auth": "fleetctl.init_auth:init_auth",
    "label": "fleetctl.label:label",
    "plan": "fleetctl.plan:plan",
    "restore": "fleetctl.restore:restore",
    "rollout": "fleetctl.rollout.verb:rollout",
    "routes": "fleetctl.routes:routes",
    "simulate": "fleetctl.simulate:simulate",
    "taint": "fleetctl.taint:taint",
    "uncordon": "fleetctl.cordon:uncordon",
    "up": "fleetctl.up:up",
    "version": "fleetctl.version:version",
    "wait": "fleetctl.wait:wait",
}


@click.group(
    cls=LazyGroup,
    verbs=_VERBS,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": None},
)
@click.version_option(version(), message="fleetctl: %(version)s")
def main() -> None:
    """Declare which models your Macs serve, and see that they do."""


if __name__ == "__main__":
    main()
