"""Who this node is: a name and a uid that survive restarts, upgrades and a lost state folder. Knows no hardware.

The uid is derived from the hardware UUID and the name, never drawn: an agent that comes back without its state is
the same node (exo#2194 made a new one at each start, and the dead ones blocked placement), and two declared nodes
on one machine differ by name. The hardware UUID is stored beside it, so that a copied disk is noticed (exo#1599).
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
_DEFAULT_HOSTNAMES: Final = ("", "localhost")  # what a machine is called that nobody named


class IdentityError(Exception):
    """The node cannot say who it is. A person has to act; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this node is. `notice` is for the operator: what was unusual, and what to check."""

    name: str
    uid: str
    hardware_uuid: str  # "" if the machine did not say
    notice: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineName:
    """What the machine says about itself, and the name it was given, if any."""

    hardware_uuid: str
    hostname: str
    name: str | None


def load_or_create(
    state_dir: Path, *, hardware_uuid: str, name: str | None, hostname: str
) -> Identity:
    """Return the stored identity if it is still this machine's; else derive one, and store it."""
    if name is not None:
        _check_name(name)
    machine = MachineName(hardware_uuid=hardware_uuid.strip().lower(), hostname=hostname, name=name)
    path = state_dir / FILE_NAME
    stored = _load(path)
    identity = resolve_identity(stored, machine, path)
    if stored is None or _file_body(stored) != _file_body(identity):
        _save(path, _file_body(identity))
    return identity


def resolve_identity(stored: Identity | None, machine: MachineName, path: Path) -> Identity:
    """Decide who the node is. Pure; the path only serves the messages."""
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
            notice=f"the hardware UUID could not be read, so {path} was trusted unchecked; "
            "a copied disk would not be noticed",
        )
    if stored.hardware_uuid:
        return stored
    known = MachineName(
        hardware_uuid=machine.hardware_uuid, hostname=machine.hostname, name=stored.name
    )
    return _derive(
        known,
        notice=f"the hardware UUID is known now; node {stored.name} has the uid derived from it, "
        f"no longer {stored.uid}, which came from the host name",
    )


def dns_label(hostname: str, *, fallback: str) -> str:
    """Make an RFC 1123 label of a host name: "Änna's Mac.local" is "anna-s-mac". Never empty if fallback is not."""
    apart = unicodedata.normalize("NFKD", hostname).lower()
    plain = "".join(sign for sign in apart if not unicodedata.combining(sign))
    host = plain.strip().rstrip(".").removesuffix(".local")
    made = re.sub(r"[^a-z0-9]+", "-", host).strip("-")
    made = made[:MAX_LABEL].rstrip("-")
    return fallback if made in _DEFAULT_HOSTNAMES else made


def uid_of(hardware_uuid: str, name: str) -> str:
    """Derive the uid of the node with this name on this machine."""
    return str(uuid.uuid5(_NAMESPACE, f"{hardware_uuid.lower()}/{name}"))


def _derive(machine: MachineName, *, notice: str | None) -> Identity:
    source = machine.hardware_uuid or f"hostname:{machine.hostname}"
    # Machines nobody named must not all be called the same, so the last resort carries the machine in it.
    unnamed = f"node-{uuid.uuid5(_NAMESPACE, source).hex[:8]}"
    name = machine.name or dns_label(machine.hostname, fallback=unnamed)
    return Identity(
        name=name, uid=uid_of(source, name), hardware_uuid=machine.hardware_uuid, notice=notice
    )


def _no_hardware_notice(machine: MachineName) -> str:
    return (
        f'the hardware UUID could not be read, so the uid was derived from the host name "{machine.hostname}". '
        "Two machines with one host name would be one node; on Linux, systemd-machine-id-setup gives "
        "/etc/machine-id"
    )


def _cloned_notice(stored: Identity, machine: MachineName, path: Path) -> str:
    return (
        f'{path} was written on another machine (hardware UUID {stored.hardware_uuid}, node "{stored.name}"; '
        f"this one is {machine.hardware_uuid}): the disk was cloned or moved. This machine is now a node of "
        f'its own. If "{stored.name}" is in the fleet still, see that the two have different names'
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
        return _parse(text, path)
    except (ValueError, RecursionError) as error:
        raise _corrupt_error(path, str(error)) from error


def _parse(text: str, path: Path) -> Identity:
    tree: object = json.loads(text)
    if not isinstance(tree, dict):
        raise _corrupt_error(path, "it is not a JSON object")
    name, uid, hardware_uuid = (tree.get(key) for key in ("name", "uid", "hardwareUuid"))
    if not isinstance(name, str) or not _LABEL.fullmatch(name):
        raise _corrupt_error(path, '"name" is not a node name')
    if not isinstance(uid, str) or not isinstance(hardware_uuid, str):
        raise _corrupt_error(path, '"uid" and "hardwareUuid" are not both texts')
    return Identity(name=name, uid=str(uuid.UUID(uid)), hardware_uuid=hardware_uuid.strip().lower())


def _corrupt_error(path: Path, why: str) -> IdentityError:
    return IdentityError(
        f'{path} is damaged: {why}. Expected {{"name": ..., "uid": ..., "hardwareUuid": ...}}. Delete the '
        "file and start the agent again with the same name: the same identity is derived from the hardware."
    )


def _save(path: Path, body: str) -> None:
    try:
        write_atomically(path, body)
    except OSError as error:
        raise IdentityError(
            f"{path} could not be written: {error.strerror}. Expected a folder with some free space that "
            f"the agent's user may write to. Make room, correct the folder's owner and mode, or choose "
            f"another state folder; nothing was changed."
        ) from error
