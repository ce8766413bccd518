"""The command `fleet-reconciler`: flags and wiring."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import click
import platformdirs

from machinery import process_log as house_logging
from machinery.clock import SystemClock
from machinery.process_main import run_until_signal
from machinery.version import version
from reconciler.controller import Controller
from reconciler.gitops.source_reconciler import GitFolders
from store.etcd.connect import connect
from store.etcd.flags import address_from_flags, etcd_options


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@etcd_options
@click.option(
    "--node-grace-period",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    envvar="FLEET_NODE_GRACE_PERIOD",
    help="Seconds until the replicas of a node that is away are placed elsewhere.",
)
@click.option(
    "--git-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(platformdirs.user_cache_dir("mlx-fleet")) / "git",
    show_default=True,
    envvar="FLEET_GIT_DIR",
    help="Folder for the commits of GitSources; you can delete it at any time.",
)
@click.option(
    "--git-credentials",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(platformdirs.user_config_dir("mlx-fleet")) / "git",
    show_default=True,
    envvar="FLEET_GIT_CREDENTIALS",
    help="Folder with the files that GitSources name in spec.credentials.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    envvar="FLEET_LOG_LEVEL",
)
def main(
    node_grace_period: float,
    git_dir: Path,
    git_credentials: Path,
    log_level: str,
    **etcd: Any,
) -> None:
    """Decide which Mac runs which replica. Run any number of reconcilers: one leads."""
    house_logging.setup("reconciler", log_level)
    etcd_address = address_from_flags(etcd)
    # `fleetctl version` shows it: the leading process and its release.
    identity = f"{socket.gethostname()}/{os.getpid()} {version()}"

    git = GitFolders(
        cache=git_dir.expanduser().absolute(), credentials=git_credentials.expanduser().absolute()
    )

    async def run() -> None:
        clock = SystemClock()
        transport = connect(etcd_address)
        try:
            await Controller(
                transport, clock, identity=identity, grace_s=node_grace_period, git=git
            ).run()
        finally:
            await transport.close()

    sys.exit(run_until_signal(run))


if __name__ == "__main__":
    main()
