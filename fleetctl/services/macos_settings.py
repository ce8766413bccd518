"""Settings of macOS: power, the application firewall, backup and index, and the memory that the GPU may wire.

They have not been made on hardware: docs/hardware.md has the check-list for the first Mac.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias, assert_never

from fleetctl.services import commands
from fleetctl.services.changes import (
    ExclusionChange,
    FirewallChange,
    MembershipChange,
    PowerChange,
    WiredLimitChange,
)
from fleetctl.services.port import ServiceError
from machinery import macos_commands
from nodeagent.hardware.macos_settings import parse_firewall_apps, parse_power

MacSetting: TypeAlias = (
    PowerChange | FirewallChange | ExclusionChange | MembershipChange | WiredLimitChange
)
REPORTS_GROUP: Final = "_analyticsusers"
"""The group that may read /Library/Logs/DiagnosticReports."""
NEVER_INDEX: Final = ".metadata_never_index"
"""The file with which Spotlight leaves out a folder."""

POWER_SETTINGS: Final[Mapping[str, str]] = {
    "sleep": "0",
    "disksleep": "0",
    "womp": "1",
    "powernap": "0",
    "autorestart": "1",
    "tcpkeepalive": "1",
}
"""Settings for mains power. `disablesleep` is none of them: it holds on battery and with a shut lid, too."""


async def with_old(change: MacSetting) -> MacSetting | None:
    """Return the change with the value before it; None if it is not necessary or could not be undone."""
    match change:
        case PowerChange():
            # A key that this Mac does not show cannot be set back.
            old = (await _power()).get(change.key, change.new)
            return None if old == change.new else change.model_copy(update={"old": old})
        case FirewallChange():
            return None if await _is_allowed(change.path) else change
        case ExclusionChange():
            before = await _exclusions(change.path)
            return None if len(before) == 2 else change.model_copy(update={"old": before})
        case MembershipChange():
            return None if await _is_member(change) else change
        case WiredLimitChange():
            limit = await _wired_limit()
            return None if limit == change.new else change.model_copy(update={"old": limit})
        case _:
            assert_never(change)


async def make(change: MacSetting) -> None:
    """Make a change; it may be made already. Raises ServiceError if macOS refuses it."""
    match change:
        case PowerChange():
            await commands.must_run(
                *macos_commands.POWER_SET.words(key=change.key, value=change.new)
            )
        case FirewallChange():
            if not await _is_allowed(change.path):
                await commands.must_run(*macos_commands.FIREWALL_ADD.words(path=change.path))
            result = await commands.must_run(
                *macos_commands.FIREWALL_UNBLOCK.words(path=change.path)
            )
            # On a managed Mac it prints a refusal, and may answer 0.
            if not await _is_allowed(change.path):
                raise ServiceError(f"the firewall does not list {change.path}: {result.words}")
        case ExclusionChange():
            await commands.must_run(*macos_commands.BACKUP_EXCLUDE.words(path=change.path))
            _mark(change.path, is_indexed=False)
        case MembershipChange():
            await commands.must_run(
                *macos_commands.MEMBER_ADD.words(user=change.user, group=change.group)
            )
        case WiredLimitChange():
            await commands.must_run(
                *macos_commands.WIRED_LIMIT_SET.words(mebibytes=str(change.new))
            )
        case _:
            assert_never(change)


async def undo(change: MacSetting) -> str:
    """Undo a change, made or not; return a sentence if something stays. Raises ServiceError if macOS refuses it."""
    match change:
        case PowerChange():
            now = (await _power()).get(change.key)
            if now == change.new:
                await commands.must_run(
                    *macos_commands.POWER_SET.words(key=change.key, value=change.old)
                )
            elif now != change.old:
                return f"pmset {change.key} stays {now}: it was changed after the installation"
        case FirewallChange():
            if not change.old and await _is_allowed(change.path):
                await commands.must_run(*macos_commands.FIREWALL_REMOVE.words(path=change.path))
        case ExclusionChange():
            is_there = Path(change.path).is_dir()
            if is_there and "backup" not in change.old:
                await commands.must_run(*macos_commands.BACKUP_INCLUDE.words(path=change.path))
            if is_there and "index" not in change.old:
                _mark(change.path, is_indexed=True)
        case MembershipChange():
            # It fails for a user that is no member any more, which is what is wanted.
            await commands.run(
                *macos_commands.MEMBER_REMOVE.words(user=change.user, group=change.group)
            )
        case WiredLimitChange():
            if await _wired_limit() == change.new:
                await commands.must_run(
                    *macos_commands.WIRED_LIMIT_SET.words(mebibytes=str(change.old))
                )
        case _:
            assert_never(change)
    return ""


async def _power() -> dict[str, str]:
    return parse_power((await commands.must_run(*macos_commands.POWER_SETTINGS.words())).out)


async def _is_allowed(path: str) -> bool:
    listed = await commands.must_run(*macos_commands.FIREWALL_APPS.words())
    return parse_firewall_apps(listed.out).get(path, False)


async def _is_member(change: MembershipChange) -> bool:
    words = macos_commands.MEMBER.words(user=change.user, group=change.group)
    # It answers "yes _mlxfleet is a member of ...", or "no ..." with a failure.
    return (await commands.run(*words)).out.startswith("yes")


async def _exclusions(path: str) -> tuple[str, ...]:
    """Return what leaves out a folder now: "backup", "index"."""
    if not Path(path).is_dir():
        return ()
    listed = await commands.must_run(*macos_commands.BACKUP_EXCLUSION.words(path=path))
    backup = ("backup",) if listed.out.startswith("[Excluded]") else ()
    return (*backup, *(("index",) if Path(path, NEVER_INDEX).exists() else ()))


def _mark(folder: str, *, is_indexed: bool) -> None:
    """Create or delete the file for Spotlight, as root in a folder of another user: no link is followed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if is_indexed:
            with suppress(FileNotFoundError):
                os.unlink(NEVER_INDEX, dir_fd=descriptor)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            os.close(os.open(NEVER_INDEX, flags, 0o644, dir_fd=descriptor))
    finally:
        os.close(descriptor)


async def _wired_limit() -> int:
    result = await commands.must_run(*macos_commands.WIRED_LIMIT.words())
    return int(result.out.strip() or 0)
