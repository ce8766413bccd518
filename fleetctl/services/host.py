"""Settings of the machine: observed, made and undone one by one. Each call may be repeated."""

import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetctl.services import commands, definition_files, macos_network, macos_settings
from fleetctl.services.changes import (
    BridgeChange,
    Change,
    FileChange,
    FolderChange,
    FolderMode,
    NetworkServiceChange,
    NetworkSwitchChange,
    ServiceChange,
    UserChange,
)
from fleetctl.services.port import ServiceError, Services
from machinery import macos_commands
from machinery.clock import Clock
from nodeagent.engines.engine_processes import stop_all

ROLE_USER: Final = "_mlxfleet"
# sysadminctl refuses role accounts with other ids.
_ROLE_IDS: Final = range(300, 400)
# The owner of folders in a dry run that also creates the user.
_UNKNOWN: Final = (-1, -1)
# Longer than an engine's drain period.
_ENGINE_GRACE_S: Final = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UserIds:
    """A user of this machine."""

    uid: int
    gid: int
    group: str


async def find_user(name: str) -> UserIds | None:
    """Return a user by name, from `id`, which also asks the directory service; None if there is none."""
    answer = await commands.run("id", name)
    if answer.code:
        return None
    found = re.match(r"uid=(\d+)\S* gid=(\d+)\(([^)]*)\)", answer.out)
    if found is None:
        raise ServiceError(f"cannot read the output of `id {name}`: {answer.words}")
    return UserIds(uid=int(found[1]), gid=int(found[2]), group=found[3])


class Host:
    """The machine on which changes are made and undone."""

    def __init__(self, services: Services, clock: Clock, *, is_mac: bool) -> None:
        self._clock = clock
        self._services = services
        self._is_mac = is_mac

    async def with_old(self, change: Change) -> Change | None:
        """Return the change with the value before it; None if it is not necessary or could not be undone."""
        match change:
            case FolderChange():
                return await self._folder_with_old(change)
            case FileChange():
                old = _read_text(Path(change.path))
                return None if old == change.content else change.model_copy(update={"old": old})
            case UserChange():
                return change if await find_user(change.name) is None else None
            case BridgeChange() | NetworkServiceChange() | NetworkSwitchChange():
                return await macos_network.with_old(change)
            case ServiceChange():
                return change
            case _:
                return await macos_settings.with_old(change)

    async def make(self, change: Change) -> None:
        """Make a change that is recorded; nothing happens if it is made already.

        Raises:
            ServiceError: the machine refuses it.

        """
        try:
            match change:
                case FolderChange():
                    path = Path(change.path)
                    path.mkdir(mode=0o700, exist_ok=True)
                    owner = await _owner(change.owner)
                    if owner == _UNKNOWN:
                        raise ServiceError(
                            f"{change.path}: this machine has no user {change.owner}"
                        )
                    if owner is not None:
                        _give(path, owner, with_content=change.has_content)
                    path.chmod(change.mode)
                case FileChange():
                    definition_files.write(Path(change.path), change.content.encode())
                case UserChange():
                    await self._add_user(change.name)
                case BridgeChange() | NetworkServiceChange() | NetworkSwitchChange():
                    await macos_network.make(change)
                case ServiceChange():
                    pass  # the caller installs it: it knows the definition
                case _:
                    await macos_settings.make(change)
        except OSError as error:
            raise ServiceError(f"cannot make the change {change}: {error.strerror}") from error

    async def undo(self, change: Change, *, is_purge: bool) -> str:
        """Undo a change, made or not; return a sentence if something stays, else "".

        Raises:
            ServiceError: the machine refuses it.

        """
        try:
            match change:
                case FolderChange():
                    return _undo_folder(change, is_purge=is_purge)
                case FileChange():
                    path = Path(change.path)
                    definition_files.remove_leftovers(path)
                    if _read_text(path) not in (change.content, change.old):
                        return f"{path} stays: it was changed after the installation"
                    if change.old is None:
                        definition_files.delete(path)
                    else:
                        definition_files.write(path, change.old.encode())
                    return ""
                case UserChange():
                    await self._delete_user(change.name)
                case BridgeChange() | NetworkServiceChange() | NetworkSwitchChange():
                    return await macos_network.undo(change)
                case ServiceChange():
                    await self._services.remove(change.name)
                    if change.engines:
                        await stop_all(Path(change.engines), self._clock, grace_s=_ENGINE_GRACE_S)
                case _:
                    return await macos_settings.undo(change)
        except OSError as error:
            raise ServiceError(f"cannot undo the change {change}: {error.strerror}") from error
        return ""

    async def _folder_with_old(self, change: FolderChange) -> FolderChange | None:
        try:
            result = Path(change.path).lstat()
        except FileNotFoundError:
            return change
        if not stat.S_ISDIR(result.st_mode):
            raise ServiceError(f"{change.path} exists and is no folder; move it away")
        if change.on_undo == "prune":
            return None
        old = FolderMode(uid=result.st_uid, gid=result.st_gid, mode=stat.S_IMODE(result.st_mode))
        owner = await _owner(change.owner)
        is_same = old.mode == change.mode and (owner is None or owner == (old.uid, old.gid))
        if owner is not None and change.has_content:
            is_same = is_same and not any(_of_others(Path(change.path), owner))
        return None if is_same else change.model_copy(update={"old": old})

    async def _add_user(self, name: str) -> None:
        if await find_user(name) is not None:
            return
        if not self._is_mac:
            await commands.must_run(
                *("useradd", "--system", "--user-group", "--no-create-home"),
                *("--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin", name),
            )
            return
        number = str(await _free_id())
        if (await commands.run(*macos_commands.GROUP.words(name=name))).code:
            await commands.must_run(*macos_commands.GROUP_ADD.words(name=name, number=number))
        await commands.must_run(*macos_commands.USER_ADD.words(name=name, number=number))
        # sysadminctl has been seen to print an error and to answer 0.
        if await find_user(name) is None:
            raise ServiceError(
                f"sysadminctl did not create the user {name}. Create it by hand, or give an "
                "existing one with --service-user"
            )

    async def _delete_user(self, name: str) -> None:
        exists = await find_user(name) is not None
        if not self._is_mac:
            if exists:
                await commands.must_run("userdel", name)
            return
        if exists:
            await commands.must_run(*macos_commands.USER_DELETE.words(name=name))
        if (await commands.run(*macos_commands.GROUP.words(name=name))).code == 0:
            await commands.must_run(*macos_commands.GROUP_DELETE.words(name=name))


async def _owner(name: str) -> tuple[int, int] | None:
    """Return the ids of an owner; None for the user of this process."""
    if not name:
        return None
    user = await find_user(name)
    if user is None:
        return _UNKNOWN
    return user.uid, user.gid


def _of_others(folder: Path, owner: tuple[int, int]) -> Iterator[Path]:
    """Yield what is in a folder and has another owner; links are not followed."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            state = path.lstat()
            if (state.st_uid, state.st_gid) != owner:
                yield path


def _give(folder: Path, owner: tuple[int, int], *, with_content: bool) -> None:
    for path in [*_of_others(folder, owner)] if with_content else []:
        os.chown(path, *owner, follow_symlinks=False)
    os.chown(folder, *owner, follow_symlinks=False)


async def _free_id() -> int:
    """Return a number that no user and no group has, among those of role accounts."""
    taken = set()
    for kind, key in (("/Users", "UniqueID"), ("/Groups", "PrimaryGroupID")):
        listed = await commands.must_run(*macos_commands.ACCOUNT_IDS.words(kind=kind, key=key))
        taken |= {int(number) for number in re.findall(r"\s(\d+)$", listed.out, re.MULTILINE)}
    free = next((number for number in _ROLE_IDS if number not in taken), None)
    if free is None:
        raise ServiceError("no user id between 300 and 399 is free; give --service-user NAME")
    return free


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _undo_folder(change: FolderChange, *, is_purge: bool) -> str:
    path = Path(change.path)
    if path.is_symlink() or not path.is_dir():
        return ""
    if change.old is not None:
        _give(path, (change.old.uid, change.old.gid), with_content=change.has_content)
        path.chmod(change.old.mode)
        return ""
    if change.on_undo == "delete" or (change.on_undo == "keep" and is_purge):
        shutil.rmtree(path)
    elif not any(path.iterdir()):
        path.rmdir()
    elif change.on_undo == "keep":
        return f"{path} stays with its content; --purge deletes it"
    return ""
