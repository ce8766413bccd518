"""The flags of every verb that logs in over ssh."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from fleetctl.remote.host_keys import user_known_hosts
from fleetctl.remote.prompts import find_prompts
from fleetctl.remote.session import SshPolicy


def ssh_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --identity and --host-key; `ssh_policy` reads them."""
    identity = click.option(
        "--identity",
        "ssh_identities",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Private key for ssh (default: those of the agent, of ~/.ssh/config and of ~/.ssh); repeatable.",
    )
    host_key = click.option(
        "--host-key",
        "ssh_host_keys",
        multiple=True,
        metavar="SHA256:...",
        help="Fingerprint of a host key that is right, for scripts; without it an unknown one is shown and asked for.",
    )
    return identity(host_key(command))


def ssh_policy(options: Mapping[str, Any]) -> SshPolicy:
    """Return how sessions are opened. Raises HostKeyError: a fingerprint is none."""
    return SshPolicy(
        hosts=user_known_hosts(Path.home(), options["ssh_host_keys"]),
        prompts=find_prompts(),
        identities=options["ssh_identities"],
        config=Path.home() / ".ssh" / "config",
    )
