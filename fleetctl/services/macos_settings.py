"""Settings of macOS: power, the application firewall, and the memory that the GPU may wire.

They have not been made on hardware: docs/hardware.md has the check-list for the first Mac.
"""

import re
from collections.abc import Mapping
from typing import Final, TypeAlias, assert_never

from fleetctl.services import commands
from fleetctl.services.changes import FirewallChange, PowerChange, WiredLimitChange
from machinery import macos_commands
from nodeagent.hardware.macos_settings import parse_power

MacSetting: TypeAlias = PowerChange | FirewallChange | WiredLimitChange

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
            await commands.must_run(*macos_commands.FIREWALL_UNBLOCK.words(path=change.path))
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
            if await _is_allowed(change.path):
                await commands.must_run(*macos_commands.FIREWALL_REMOVE.words(path=change.path))
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
    return bool(re.search(rf"(^|\s){re.escape(path)}\s*$", listed.out, re.MULTILINE))


async def _wired_limit() -> int:
    result = await commands.must_run(*macos_commands.WIRED_LIMIT.words())
    return int(result.out.strip() or 0)
