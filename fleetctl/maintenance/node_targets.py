"""The ssh targets of nodes: users and addresses."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.remote.session import RemoteMac, SshPolicy, connect
from fleetctl.remote.ssh_flags import ssh_options
from fleetctl.remote.target import RemoteTarget, parse_target
from identity.dialer import is_local
from schemas.node import Node

Command = Callable[..., Any]


def target_options(command: Command) -> Command:
    """Add the flags that say where the Macs of nodes are reached over ssh; `find_targets` reads two of them."""
    user = click.option(
        "--ssh-user",
        envvar="FLEET_SSH_USER",
        default="",
        metavar="USER",
        help="User to log in as, an administrator of the Macs; their addresses are those of their nodes.",
    )
    target = click.option(
        "--target",
        "ssh_targets",
        multiple=True,
        metavar="NODE=USER@HOST[:PORT]",
        help="Where to log in for one node, in place of --ssh-user and its address; may be repeated.",
    )
    return user(target(ssh_options(command)))


def find_targets(nodes: Sequence[Node], options: Mapping[str, Any]) -> dict[str, RemoteTarget]:
    """Return the targets of nodes.

    Raises:
        FleetctlError: a node's target is unknown; click.UsageError: a flag has another form.

    """
    given: dict[str, RemoteTarget] = {}
    for word in options["ssh_targets"]:
        name, equals, target = word.partition("=")
        if not equals or name not in {node.name for node in nodes}:
            known = ", ".join(node.name for node in nodes[:5])
            raise click.UsageError(
                f"--target {word[:200]}: expected NODE=USER@HOST for one of the nodes ({known})"
            )
        given[name] = parse_target(target)
    return {node.name: given.get(node.name) or _from_status(node, options) for node in nodes}


def is_on_this_machine(node: Node) -> bool:
    """Return whether the node's address is one of this machine's loopback."""
    return node.status is not None and is_local(f"http://{node.status.address}")


def _from_status(node: Node, options: Mapping[str, Any]) -> RemoteTarget:
    user = options["ssh_user"]
    address = node.status.address if node.status is not None else ""
    if not user or not address or is_on_this_machine(node):
        raise FleetctlError(
            f"node/{node.name}: where to log in is unknown: give --ssh-user for its address {address or '(none)'}, or "
            f"--target {node.name}=USER@HOST"
        )
    return parse_target(f"{user}@[{address}]" if ":" in address else f"{user}@{address}")


@dataclass(slots=True)
class NodeSessions:
    """Open sessions with the Macs of nodes; each is opened once, so that a password is asked once."""

    targets: Mapping[str, RemoteTarget]
    policy: SshPolicy
    _stack: AsyncExitStack
    _open: dict[str, RemoteMac]

    @classmethod
    def create(
        cls, targets: Mapping[str, RemoteTarget], policy: SshPolicy, stack: AsyncExitStack
    ) -> "NodeSessions":
        """Return sessions that end with the stack."""
        return cls(targets, policy, stack, {})

    async def open(self, node: str) -> RemoteMac:
        """Return the session with a node's Mac. Raises RemoteError."""
        if node not in self._open:
            session = connect(self.targets[node], self.policy)
            self._open[node] = await self._stack.enter_async_context(session)
        return self._open[node]

    def forget(self, node: str) -> None:
        """Open a new session the next time: the Mac restarts."""
        self._open.pop(node, None)
