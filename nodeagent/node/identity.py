"""The identity of the node: a name and a uid that survive restarts, upgrades and a lost state folder. Reads no hardware.

The uid is derived from the hardware UUID and the name, never random: an agent that lost its state is still the same
node (exo#2194 made a new one at each start, and the dead ones blocked placement), and two declared nodes on one
machine differ by name. The hardware UUID is stored with it, so that a copied disk is noticed (exo#1599).
"""

import json
import re
import unicodedata
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from machinery.files import write_atomically

FILE_NAME: Final = "identity.json"
MAX_LABEL: Final = 63

_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_DNS, "node.mlx-fleet")
_LABEL: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_DEFAULT_HOSTNAMES: Final = ("", "localhost")  # the names of a machine that has no name


class IdentityError(Exception):
    """The node has no valid identity. A person must act; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The node's identity. `notice` tells the operator what was unusual and what to check."""

    name: str
    uid: str
    hardware_uuid: str  # "" if unknown
    notice: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineName:
    """The machine's identifiers, and the name that a flag gives it, if any."""

    hardware_uuid: str
    hostname: str
    name: str | None


def load_or_create(
    state_dir: Path, *, hardware_uuid: str, name: str | None, hostname: str
) -> Identity:
    """Return the stored identity if it is this machine's; otherwise derive and store one.

    Raises:
        IdentityError: the name is invalid or another one, or the file is damaged or not accessible.

    """
    if name is not None:
        _check_name(name)
    machine = MachineName(hardware_uuid=hardware_uuid.strip().lower(), hostname=hostname, name=name)
    path = state_dir / FILE_NAME
    stored = _load(path)
    identity = resolve_identity(stored, machine, path)
    if stored is None or _file_body(stored) != _file_body(identity):
        body = _file_body(identity)
        try:
            write_atomically(path, body)
        except OSError as error:
            raise IdentityError(
                f"{path} could not be written: {error.strerror}. Expected a folder with some free space that "
                f"the agent's user may write to. Make room, correct the folder's owner and mode, or choose "
                f"another state folder; nothing was changed."
            ) from error
    return identity


def resolve_identity(stored: Identity | None, machine: MachineName, path: Path) -> Identity:
    """Return the identity from the stored one and the machine. Pure; the path is used in messages."""
    if stored is None:
        return _derive(
            machine, notice=None if machine.hardware_uuid else _no_hardware_notice(machine)
        )
    if machine.hardware_uuid and stored.hardware_uuid not in {"", machine.hardware_uuid}:
        return _derive(machine, notice=_cloned_notice(stored, machine, path))
    if machine.name not in {None, stored.name}:
        raise IdentityError(
            f'{path} belongs to node "{stored.name}", but the name "{machine.name}" was given. '
            f'Start with the name "{stored.name}", or give "{machine.name}" a state folder of its '
            f"own. To rename this node: drain it, stop its agent, delete {path}, start it again."
        )
    if not machine.hardware_uuid:
        return Identity(
            name=stored.name,
            uid=stored.uid,
            hardware_uuid=stored.hardware_uuid,
            notice=f"the hardware UUID could not be read, so {path} was used without a check; "
            "a copied disk would not be noticed",
        )
    if stored.hardware_uuid:
        return stored
    known = MachineName(
        hardware_uuid=machine.hardware_uuid, hostname=machine.hostname, name=stored.name
    )
    return _derive(
        known,
        notice=f"the hardware UUID is known now; the uid of node {stored.name} is derived from it "
        f"and replaces {stored.uid}, which was derived from the host name",
    )


def dns_label(hostname: str, *, fallback: str) -> str:
    """Return a host name as RFC 1123 label: "Änna's Mac.local" is "anna-s-mac". Returns `fallback` for no name."""
    apart = unicodedata.normalize("NFKD", hostname).lower()
    plain = "".join(sign for sign in apart if not unicodedata.combining(sign))
    host = plain.strip().rstrip(".").removesuffix(".local")
    made = re.sub(r"[^a-z0-9]+", "-", host).strip("-")
    made = made[:MAX_LABEL].rstrip("-")
    return fallback if made in _DEFAULT_HOSTNAMES else made


def uid_of(hardware_uuid: str, name: str) -> str:
    """Return the uid of the node with this name on this machine."""
    return str(uuid.uuid5(_NAMESPACE, f"{hardware_uuid.lower()}/{name}"))


def _derive(machine: MachineName, *, notice: str | None) -> Identity:
    source = machine.hardware_uuid or f"hostname:{machine.hostname}"
    # Machines without names must not share one, so the last resort contains a part of the machine's id.
    unnamed = f"node-{uuid.uuid5(_NAMESPACE, source).hex[:8]}"
    name = machine.name or dns_label(machine.hostname, fallback=unnamed)
    return Identity(
        name=name, uid=uid_of(source, name), hardware_uuid=machine.hardware_uuid, notice=notice
    )


def _no_hardware_notice(machine: MachineName) -> str:
    return (
        f'the hardware UUID could not be read, so the uid was derived from the host name "{machine.hostname}". '
        "Two machines with the same host name would be one node. On Linux, systemd-machine-id-setup creates "
        "/etc/machine-id"
    )


def _cloned_notice(stored: Identity, machine: MachineName, path: Path) -> str:
    return (
        f'{path} was written on another machine (hardware UUID {stored.hardware_uuid}, node "{stored.name}"; '
        f"this one is {machine.hardware_uuid}): the disk was cloned or moved. This machine is now a node of "
        f'its own. If "{stored.name}" is still in the fleet, give the two different names'
    )


def _check_name(name: str) -> None:
    if not _LABEL.fullmatch(name):
        raise IdentityError(
            f'"{name}" cannot be a node name. Expected at most {MAX_LABEL} of a-z, 0-9 and "-", beginning and '
            f'ending with a letter or digit; try "{dns_label(name, fallback="node-1")}"'
        )


def _file_body(identity: Identity) -> str:
    fields = {
        "name": identity.name,
        "uid": identity.uid,
        "hardwareUuid": identity.hardware_uuid,
    }
    return json.dumps(fields, indent=2) + "\n"


def _load(path: Path) -> Identity | None:
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IdentityError(
            f"{path} could not be read: {error.strerror}. Expected a JSON file that the agent's user may "
            f"read and write. Correct its owner and mode, or choose another state folder."
        ) from error
    except UnicodeDecodeError as error:
        raise _corrupt_error(path, "it is not UTF-8 text") from error
    try:
        tree: object = json.loads(text)
        if not isinstance(tree, dict):
            raise _corrupt_error(path, "it is not a JSON object")
        name, uid, hardware_uuid = (tree.get(key) for key in ("name", "uid", "hardwareUuid"))
        if not isinstance(name, str) or not _LABEL.fullmatch(name):
            raise _corrupt_error(path, '"name" is not a node name')
        if not isinstance(uid, str) or not isinstance(hardware_uuid, str):
            raise _corrupt_error(path, '"uid" and "hardwareUuid" are not both texts')
        return Identity(
            name=name, uid=str(uuid.UUID(uid)), hardware_uuid=hardware_uuid.strip().lower()
        )
    except (ValueError, RecursionError) as error:
        raise _corrupt_error(path, str(error)) from error


def _corrupt_error(path: Path, why: str) -> IdentityError:
    return IdentityError(
        f'{path} is damaged: {why}. Expected {{"name": ..., "uid": ..., "hardwareUuid": ...}}. Delete the '
        "file and start the agent again with the same name: the same identity is derived from the hardware."
    )
