"""The verb `fleetctl secure`: gives an existing fleet a certificate authority, and moves its TLS mode step by step.

The modes are those of a migration: `permissive`, `tls`, `strict`. Requests go on in every step, in both directions.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fleetctl.cli.arguments import parse_duration, reason_option, timeout_option
from fleetctl.cli.connect import with_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.fleet_trust import (
    Machine,
    ManagedIdentity,
    administrator,
    ensure_identity,
    ensure_trust,
    open_authority,
)
from fleetctl.fleets.join_material import MAKE_AUTHORITY
from fleetctl.fleets.tls_migration import (
    STEPS,
    Blocker,
    TlsMigration,
    read_migration,
    status_rows,
    write_mode,
)
from fleetctl.output import printers
from identity.folder import FolderError, IdentityFolder
from identity.signer import IssueError, Signer
from machinery.clock import Clock, SystemClock
from schemas.trust import TlsMode
from store.errors import ConflictError
from store.port import Transport

Say = Callable[[str], None]
_LOOK_S = 0.25
# Engines read their agent's files twice a second, after the agent has reported the mode.
_ENGINES_FOLLOW_S = 1.5
_ADMIN_FOLDER = "admin"

_HELP = """Give a fleet that runs its own etcd a certificate authority, and move it to TLS.

\b
  fleetctl secure --authority-dir /etc/mlx-fleet/authority    the authority; nothing is refused yet
  fleetctl secure status                                      what each process still needs
  fleetctl secure --mode strict                               by way of `tls`; refuses while a process is not ready

A step back (--mode permissive) is possible at any time. No request fails in any of the steps.
"""


@click.command(
    "secure", help=_HELP, short_help="Make a certificate authority, and move a fleet to TLS."
)
@click.argument("what", type=click.Choice(["status"]), required=False)
@click.option(
    "--authority-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the authority on this control Mac (mode 0700); made if it does not exist.",
)
@click.option(
    "--mode",
    type=click.Choice([str(step) for step in STEPS]),
    help="TLS mode to move to: permissive (TLS and plain), tls (clients use TLS), strict (plain is refused).",
)
@timeout_option("60s", "Time limit for the processes to follow each step.")
@reason_option
@with_store
async def secure(
    transport: Transport,
    what: str | None,
    authority_dir: Path | None,
    mode: str | None,
    **options: Any,
) -> None:
    """Make the authority, move the mode, or show what the processes report."""
    if what is not None and (authority_dir is not None or mode is not None):
        raise click.UsageError("`secure status` takes neither --authority-dir nor --mode")
    clock, timeout_s = SystemClock(), parse_duration(options["timeout"])
    if authority_dir is not None:
        folder = authority_dir.expanduser().absolute()
        # Make the fleet's authority, its trust in the store, and this administrator's identity.
        say = click.echo
        authority = open_authority(folder, clock)
        trust, is_new = await ensure_trust(transport, authority, folder, TlsMode.PERMISSIVE)
        machine = Machine(hostname=socket.gethostname(), hardware_uuid="")
        admin = ManagedIdentity(
            identity=administrator(trust.fleet, machine),
            folder=IdentityFolder(folder / _ADMIN_FOLDER),
        )
        signer = Signer(transport=transport, clock=clock, authority=authority)
        try:
            await ensure_identity(signer, trust, admin, machine)
        except (IssueError, FolderError) as error:
            raise FleetctlError(str(error)) from error
        state = "made" if is_new else "unchanged"
        say(f"authority of fleet {trust.fleet} {state} in {folder}; TLS mode {trust.mode}")
        say("next:")
        say(f"  - restart one reconciler on this Mac with --authority-dir {folder}")
        say(
            "  - restart every agent, gateway and reconciler; gateways and reconcilers with --identity-dir DIR"
        )
        say(f"  - use fleetctl with --identity-dir {admin.folder.path}")
        say("  - then: fleetctl secure status")
    if mode is not None:
        await ModeChange(transport, clock, timeout_s, click.echo).move(TlsMode(mode))
    if authority_dir is None and mode is None:
        _print_status(await _read(transport))


async def _read(transport: Transport) -> TlsMigration:
    migration = await read_migration(transport)
    if migration is None:
        raise FleetctlError(f"this fleet has no certificate authority. {MAKE_AUTHORITY}")
    return migration


@dataclass(frozen=True, slots=True)
class ModeChange:
    """A change of the fleet's mode, which takes one step after another."""

    transport: Transport
    clock: Clock
    timeout_s: float
    say: Say

    async def move(self, wanted: TlsMode) -> None:
        """Move to the mode, and wait until every process follows it.

        Raises:
            FleetctlError: a process is not ready, or does not follow; the mode stays at the last step.

        """
        while path := (await _read(self.transport)).path(wanted):
            step = path[0]
            migration = await self._ready(step)
            try:
                await write_mode(self.transport, migration, step)
            except ConflictError:
                continue  # another change of the trust: look again
            is_back = STEPS.index(step) < STEPS.index(migration.trust.mode)
            self.say(f"TLS mode {step}")
            # Wait until every process follows the mode; on the way back, no longer than the time
            # limit.
            deadline = self.clock.monotonic() + self.timeout_s
            while missing := (await _read(self.transport)).followers_missing():
                if self.clock.monotonic() < deadline:
                    await self.clock.sleep(_LOOK_S)
                    continue
                text = (
                    f"{_count(missing)} not following after {self.timeout_s:g} s: {_text(missing)}"
                )
                if not is_back:
                    raise FleetctlError(
                        f"{text}. See its log, or go back with `fleetctl secure --mode permissive`"
                    )
                self.say(f"warning: {text}")
                break
            await self.clock.sleep(_ENGINES_FOLLOW_S)
        migration = await _read(self.transport)
        self.say(f"every process follows TLS mode {migration.trust.mode}")

    async def _ready(self, step: TlsMode) -> TlsMigration:
        """Wait for what goes by itself; return the state in which nothing blocks the step."""
        deadline = self.clock.monotonic() + self.timeout_s
        while True:
            migration = await _read(self.transport)
            blockers = migration.blockers(step)
            if not blockers:
                return migration
            is_hopeless = any(not blocker.is_brief for blocker in blockers)
            if is_hopeless or self.clock.monotonic() >= deadline:
                raise FleetctlError(
                    f"the TLS mode stays {migration.trust.mode}; {_count(blockers)} not ready for {step}: "
                    f"{_text(blockers)}"
                )
            await self.clock.sleep(_LOOK_S)


def _count(blockers: Sequence[Blocker]) -> str:
    return "1 part is" if len(blockers) == 1 else f"{len(blockers)} parts are"


def _text(blockers: Sequence[Blocker]) -> str:
    return "".join(f"\n  {blocker.label}: {blocker.remedy}" for blocker in blockers)


def _print_status(migration: TlsMigration) -> None:
    trust = migration.trust
    click.echo(f"fleet {trust.fleet}, TLS mode {trust.mode}\n")
    click.echo(printers.align_columns(status_rows(migration)))
    plain = len(migration.plain_endpoints)
    click.echo(f"\nengines: {migration.engines}, of which {plain} serve other machines without TLS")
    forward = STEPS[STEPS.index(trust.mode) + 1 :]
    if not forward:
        return
    blockers = migration.blockers(forward[0])
    if blockers:
        click.echo(f"not ready for {forward[0]}:{_text(blockers)}")
    else:
        click.echo(f"ready: fleetctl secure --mode {forward[0]}")
