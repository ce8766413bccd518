"""Removal of everything of the fleet from a machine: the agent with its settings, and the programs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fleetctl.machines.setup import read_certificate
from fleetctl.remote.errors import RemoteError
from fleetctl.remote.session import RemoteMac
from fleetctl.services.layout import Layout, system_layout
from identity.authority import identity_of
from identity.names import Role
from machinery import macos_commands
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from store import keys
from store.port import Transport

# Engines have time to finish; unloading 370 GB takes 4 s (omlx#2184).
_UNINSTALL_S: Final = 300.0
_POLL: Final = Backoff(first_s=0.2, limit_s=1.0)


async def machine_layout(mac: RemoteMac) -> Layout:
    """Return the folders of the services on a machine."""
    kernel = (await mac.must_run(macos_commands.KERNEL.words())).out
    return system_layout("launchd" if kernel.startswith("Darwin") else "systemd", Path("/"))


async def node_name(mac: RemoteMac, layout: Layout) -> str:
    """Return the name of the node that a machine is; "" if it is none."""
    own = await read_certificate(mac, layout)
    if own is None:
        return ""
    identity = identity_of(own)
    return identity.name if identity.role is Role.NODE else ""


async def uninstall(mac: RemoteMac, layout: Layout, *, keeps_models: bool) -> list[str]:
    """Stop the agent and its engines, undo what changes.json lists, and remove the programs; return notes for people.

    Other services of the fleet on that machine keep running, with the programs.

    Raises:
        RemoteError: a change could not be undone; the same call goes on from there.

    """
    program = str(layout.program("fleetctl"))
    if not (await mac.run((program, "--version"))).is_ok:
        return [f"{mac.target.host} has no programs of mlx-fleet"]
    purge = () if keeps_models else ("--purge",)
    done = await mac.run(
        (program, "service", "uninstall", "nodeagent", *purge), sudo=True, limit_s=_UNINSTALL_S
    )
    if not done.is_ok:
        raise RemoteError(f"{mac.target.host}: the agent cannot be uninstalled: {done.line}")
    notes = [line for line in done.out.splitlines() if line]
    others = await mac.run((program, "service", "status", "-o", "json"), sudo=True)
    names = _names(others.out)
    if names:
        return [*notes, f"{', '.join(names)} and the programs stay on {mac.target.host}"]
    script = str(layout.home / "current" / "install.sh")
    await mac.must_run(("/bin/sh", script, "--uninstall"), sudo=True, limit_s=_UNINSTALL_S)
    await mac.run(("rmdir", str(layout.home)), sudo=True)
    return [*notes, "the programs were removed"]


async def wait_until_silent(
    transport: Transport, clock: Clock, name: str, limit_s: float, say: Callable[[str], None]
) -> None:
    """Wait until the fleet no longer takes a node for alive: an agent that stops leaves its lease to the next one.

    Raises:
        RemoteError: it is alive after the limit, so its agent runs somewhere else.

    """
    deadline = clock.monotonic() + limit_s
    retries, is_said = Retries(_POLL, clock), False
    while await transport.get(keys.node_lease_key(name)) is not None:
        if clock.monotonic() >= deadline:
            raise RemoteError(
                f"node/{name} is alive after {limit_s:g} s: does its agent run on another machine?"
            )
        if not is_said:
            say(f"waiting until the lease of node/{name} ends")
            is_said = True
        await retries.wait()


def _names(status: str) -> list[str]:
    try:
        return [str(load["name"]) for load in json.loads(status)]
    except (ValueError, KeyError, TypeError):
        return []
