"""The remedies that `fleetctl doctor --fix` carries out: safe ones only, each of which looks again before and after.

None of them ends a process, deletes an object, or undoes what a person decided, such as a cordon.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetctl.doctor import observe_models, observe_security
from fleetctl.doctor.observe_control import open_admin
from insight.doctor.control_plane import ETCD_SPACE
from insight.doctor.findings import Finding
from insight.doctor.model_checks import PARTIAL_FILES
from insight.doctor.transport_security import OPEN_FILES
from machinery.clock import Clock
from schemas import quantity
from schemas.quantity import counted
from store.errors import PermissionDeniedError, StoreError
from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import MaintenanceClient, member_addresses

# Watches that lag a little behind still go on (store/etcd/member/maintenance.py keeps as many).
_KEPT_REVISIONS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FixContext:
    """The fleet and the machine that remedies work on."""

    address: EtcdAddress
    data_dir: Path | None
    """The fleet's folder on this machine; None if it has none."""
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One remedy."""

    name: str
    """As in `Finding.fix`."""
    title: str
    """Description for people."""
    run: Callable[[FixContext], Awaitable[str]]
    """Carries it out, and returns what it did; empty if nothing was left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixResult:
    """The outcome of one remedy."""

    name: str
    is_done: bool
    message: str


async def _delete_partial_files(context: FixContext) -> str:
    now = context.clock.now()
    partial_files = await observe_models.read_partial_files(context.data_dir, now)
    deleted = [file for file in partial_files if observe_models.delete_partial_file(file, now)]
    size = quantity.show(sum(partial_file.size_bytes for partial_file in deleted))
    return f"deleted {counted(len(deleted), 'file', 'files')} with {size}" if deleted else ""


async def _close_secret_files(context: FixContext) -> str:
    changed = await asyncio.to_thread(observe_security.close_open_secrets, context.data_dir)
    return f"set the mode 0600 of {', '.join(map(str, changed))}" if changed else ""


async def _free_etcd_space(context: FixContext) -> str:
    """Drop the history of etcd; where it refuses writes, defragment each member, and switch the alarm off.

    A defragmentation pauses a member for a second or two per GiB: only a member that refuses writes is worth that.
    """
    results = []
    for address in member_addresses(context.address):
        async with open_admin(MaintenanceClient(address)) as client:
            status = await client.status()
            horizon = max(1, status.revision - _KEPT_REVISIONS)
            await client.compact(horizon)
            done = f"dropped etcd's history before revision {horizon}"
            alarms = await client.alarms() if status.has_alarms else ()
            full = [alarm for alarm in alarms if alarm.kind == "NOSPACE"]
            if full:
                await client.defragment()
                for alarm in full:
                    await client.disarm(alarm)
                done += ", defragmented its file, and switched the alarm off"
            results.append(done)
    return "; ".join(dict.fromkeys(results))


FIXES: Final = (
    Fix(
        name=ETCD_SPACE,
        title="drop etcd's history; if it refuses writes, defragment it and switch the alarm off",
        run=_free_etcd_space,
    ),
    Fix(
        name=OPEN_FILES,
        title="take the rights of other users away from files with secrets",
        run=_close_secret_files,
    ),
    Fix(
        name=PARTIAL_FILES,
        title="delete files of interrupted downloads that nothing continues",
        run=_delete_partial_files,
    ),
)


def plan_fixes(findings: Sequence[Finding]) -> tuple[Fix, ...]:
    """Return the remedies for findings, each once; findings about other machines need a person there."""
    wanted = {finding.fix for finding in findings if not finding.node}
    return tuple(fix for fix in FIXES if fix.name in wanted)


async def run_fix(fix: Fix, context: FixContext) -> FixResult:
    """Carry one remedy out; a failure is a result, and the others go on."""
    try:
        message = await fix.run(context)
    except PermissionDeniedError as error:
        why = f"{error}; run it as a user of etcd with the right to, such as root"
        return FixResult(name=fix.name, is_done=False, message=why)
    except (OSError, StoreError) as error:
        return FixResult(name=fix.name, is_done=False, message=str(error))
    return FixResult(name=fix.name, is_done=True, message=message or "nothing was left to do")
