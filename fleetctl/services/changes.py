"""Changes of a machine that `fleetctl service install` makes, and the record of them in changes.json.

Each change is recorded, with the value before it, before it is made, so that an uninstall can undo it after a kill at
any moment. The record also says which services need a change: it is undone with the last of them.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fleetctl.services.port import ServiceError
from machinery import files

_MAX_BYTES: Final = 1 << 20
_VERSION: Final = 1
RECORD_NAME: Final = "changes.json"


class Recorded(BaseModel):
    """Base of what changes.json holds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FolderMode(Recorded):
    """Owner and mode of a folder."""

    uid: int
    gid: int
    mode: int


class FolderChange(Recorded):
    """A folder that is created, or gets another owner or mode."""

    kind: Literal["folder"] = "folder"
    path: str
    mode: int
    owner: str = ""
    """User that owns it; empty for the user of the installing process."""
    has_content: bool = False
    """True if the files in it get the owner, too."""
    on_undo: Literal["delete", "keep", "prune"] = "delete"
    """The fate of its content: deleted; kept unless --purge is given; kept, because it is a folder of the system."""
    old: FolderMode | None = None
    """None if the folder did not exist."""


class FileChange(Recorded):
    """A text file of the system that is written."""

    kind: Literal["file"] = "file"
    path: str
    content: str
    old: str | None = None
    """None if the file did not exist."""


class UserChange(Recorded):
    """A user without a login, and its group, that are created."""

    kind: Literal["user"] = "user"
    name: str


class PowerChange(Recorded):
    """A setting of `pmset` for mains power."""

    kind: Literal["power"] = "power"
    key: str
    new: str
    old: str = ""


class FirewallChange(Recorded):
    """A program that the application firewall lets accept connections."""

    kind: Literal["firewall"] = "firewall"
    path: str
    program: str = ""
    """The file that `path` was resolved from: another release resolves it to another path."""
    old: bool = False
    """True if it was allowed before."""


class ExclusionChange(Recorded):
    """A folder that Time Machine does not back up and Spotlight does not index."""

    kind: Literal["exclusion"] = "exclusion"
    path: str
    old: tuple[Literal["backup", "index"], ...] = ()
    """Rules that left it out before."""


class MembershipChange(Recorded):
    """A user that becomes a member of a group of the system."""

    kind: Literal["membership"] = "membership"
    user: str
    group: str


class WiredLimitChange(Recorded):
    """The memory that the GPU may wire, in MiB; 0 is the default of macOS."""

    kind: Literal["wiredLimit"] = "wiredLimit"
    new: int
    old: int = 0


class BridgeChange(Recorded):
    """A bridge over Thunderbolt ports that is dissolved, now and in the stored settings."""

    kind: Literal["bridge"] = "bridge"
    name: str
    members: tuple[str, ...]
    """Members of the running bridge."""
    stored: str = ""
    """A property list with its stored settings; empty if there were none."""


class NetworkServiceChange(Recorded):
    """A network service that is created for one Thunderbolt port."""

    kind: Literal["networkService"] = "networkService"
    name: str
    port: str
    """Hardware port, such as "Thunderbolt 2"."""
    address: str = ""
    """IPv4 address with the length of its network; empty while no cable leads to a Mac."""
    salt: str = ""
    """The salt from which the address is derived."""


class NetworkSwitchChange(Recorded):
    """A foreign network service that is switched off, because it holds a Thunderbolt port."""

    kind: Literal["networkSwitch"] = "networkSwitch"
    name: str


NetworkChange: TypeAlias = BridgeChange | NetworkServiceChange | NetworkSwitchChange


class ServiceChange(Recorded):
    """A service that is installed."""

    kind: Literal["service"] = "service"
    name: str
    engines: str = ""
    """Folder of the engines that it starts, and that outlive it; empty for none."""


Change: TypeAlias = (
    FolderChange
    | FileChange
    | UserChange
    | PowerChange
    | FirewallChange
    | ExclusionChange
    | MembershipChange
    | WiredLimitChange
    | NetworkChange
    | ServiceChange
)
BEST_EFFORT: Final = (PowerChange, FirewallChange, ExclusionChange, MembershipChange)
"""Changes that a managed Mac (MDM) may refuse; a service works without them."""


def key_of(change: Change) -> str:
    """Return the thing that a change is about: a second change of it replaces the first."""
    match change:
        case FolderChange() | FileChange() | FirewallChange() | ExclusionChange():
            return f"{change.kind}:{change.path}"
        case (
            UserChange()
            | ServiceChange()
            | BridgeChange()
            | NetworkServiceChange()
            | NetworkSwitchChange()
        ):
            return f"{change.kind}:{change.name}"
        case PowerChange():
            return f"{change.kind}:{change.key}"
        case MembershipChange():
            return f"{change.kind}:{change.user}:{change.group}"
        case WiredLimitChange():
            return change.kind


class Entry(Recorded):
    """One recorded change, and the services that need it."""

    change: Annotated[Change, Field(discriminator="kind")]
    needed_by: tuple[str, ...]


class Document(Recorded):
    """The content of changes.json."""

    version: int = _VERSION
    backend: str = ""
    """The adapter that installed the services."""
    created: tuple[str, ...] = ()
    """Folders that were created for changes.json itself, the outermost first."""
    entries: tuple[Entry, ...] = ()


class ChangeRecord:
    """changes.json: every call that changes it returns when the disk has it."""

    def __init__(self, home: Path) -> None:
        """`home` is the folder of the installation."""
        self._home = home
        self.path = home / RECORD_NAME

    def read(self) -> Document:
        """Return what is recorded; an empty document if nothing is.

        Raises:
            ServiceError: the file cannot be read, or a newer version wrote it.

        """
        try:
            with self.path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return Document()
        except OSError as error:
            raise ServiceError(f"cannot read {self.path}: {error.strerror}") from error
        if len(content) > _MAX_BYTES:
            raise ServiceError(f"{self.path} is larger than 1 MiB, so fleetctl did not write it")
        try:
            version = json.loads(content).get("version")
            if version != _VERSION:
                raise ServiceError(
                    f"{self.path} has version {version}, and this fleetctl knows {_VERSION}: use "
                    "the fleetctl that installed the services"
                )
            return Document.model_validate_json(content)
        except (ValidationError, ValueError, AttributeError) as error:
            raise ServiceError(
                f"{self.path} is damaged: {error}. Restore it from a backup; without it, nothing "
                "can be undone"
            ) from error

    def write(self, document: Document) -> None:
        """Replace the record.

        Raises:
            ServiceError: it cannot be written.

        """
        try:
            if self._home.is_dir():
                self._remove_leftovers()
                files.write_atomically(self.path, _text(document), mode=0o644)
            else:
                # Create the folder and the missing ones above it together with the record, in one
                # step. A folder that was created before its record would stay behind after a kill
                # between the two.
                missing = [
                    path
                    for path in (*reversed(self._home.parents), self._home)
                    if not path.exists()
                ]
                top, draft = missing[0], self._draft(missing[0])
                shutil.rmtree(draft, ignore_errors=True)
                inner = draft / self._home.relative_to(top)
                inner.mkdir(parents=True, mode=0o755)
                complete = document.model_copy(update={"created": tuple(map(str, missing))})
                files.write_atomically(inner / RECORD_NAME, _text(complete), mode=0o644)
                draft.rename(top)
                files.sync_folder(top.parent)
        except OSError as error:
            raise ServiceError(f"cannot write {self.path}: {error.strerror}") from error

    def delete(self) -> None:
        """Delete the record, and the folders that were created for it and hold nothing else.

        Raises:
            ServiceError: it cannot be deleted.

        """
        try:
            document = self.read()
            self._remove_leftovers()
            top = self._outermost_empty(document.created)
            if top is None:
                self.path.unlink(missing_ok=True)
            else:
                # In one step, as they were created.
                top.rename(self._draft(top))
            self.remove_drafts()
        except OSError as error:
            raise ServiceError(f"cannot delete {self.path}: {error.strerror}") from error

    def _outermost_empty(self, created: Sequence[str]) -> Path | None:
        """Return the outermost created folder that holds only the way to the record."""
        for name in created:
            path = Path(name)
            expected = {path / part for part in self.path.relative_to(path).parents} | {self.path}
            if all(found in expected for found in path.rglob("*")):
                return path
        return None

    def remove_drafts(self) -> None:
        """Delete what a killed creation or deletion left beside the folders."""
        for path in (self._home, *self._home.parents):
            if path.name and self._draft(path).exists():
                shutil.rmtree(self._draft(path))

    def _remove_leftovers(self) -> None:
        self.remove_drafts()
        for leftover in self._home.glob(f".{RECORD_NAME}.*"):
            leftover.unlink(missing_ok=True)

    @staticmethod
    def _draft(path: Path) -> Path:
        return path.with_name(f".{path.name}.mlx-fleet")


def _text(document: Document) -> str:
    return document.model_dump_json(indent=1) + os.linesep
