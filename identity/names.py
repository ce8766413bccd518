"""Names of identities: the URI in a certificate that says which process of which fleet holds its key. Pure.

    mlxfleet://6f1c.../node/mac-1        mlxfleet://6f1c.../gateway/edge-2

A certificate has no common name: etcd's JSON gateway refuses one beside a password.
"""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from schemas.meta import NAME_PATTERN

DOMAIN: Final = "mlx-fleet.internal"
"""The domain of the DNS names in certificates; no resolver knows it (RFC 9476 is for names like it)."""
_FLEET = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(NAME_PATTERN.removeprefix("^").removesuffix("$"))
_MAX_NAME = 128
# RFC 1035, 2.3.4: a label has at most 63 characters. A whole name has at most 253.
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAX_DNS_NAME = 200
_SCHEME = "mlxfleet://"
# No name has it.
_WORKER = "~"


class Role(StrEnum):
    """The part that a process plays in the fleet."""

    NODE = "node"
    """An agent and the engines of its Mac."""
    GATEWAY = "gateway"
    RECONCILER = "reconciler"
    DASHBOARD = "dashboard"
    """A recorder of the fleet: it reads what gateways and agents measure."""
    ADMIN = "admin"
    """A person with fleetctl, or CI."""
    ETCD = "etcd"


class IdentityError(ValueError):
    """A text is no identity; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A role and a name in one fleet.

    Raises:
        IdentityError: the fleet's uid or the name has another form.

    """

    fleet: str
    """The uid of the fleet: 32 hexadecimal digits."""
    role: Role
    name: str
    """A name as of API objects, such as a node's."""

    def __post_init__(self) -> None:
        if not _FLEET.fullmatch(self.fleet):
            raise IdentityError(f"{self.fleet!r} is no fleet uid: expected 32 hexadecimal digits")
        if len(self.name) > _MAX_NAME or not _NAME.fullmatch(self.name):
            raise IdentityError(
                f"{self.name[:_MAX_NAME]!r} is no name: expected a-z, 0-9, - and ., at most {_MAX_NAME} characters"
            )

    @property
    def uri(self) -> str:
        """The URI in the certificate."""
        return f"{_SCHEME}{self.fleet}/{self.role}/{self.name}"

    @property
    def dns_name(self) -> str:
        """The DNS name in the certificate, which a client expects of a server whatever its address is.

        A name that is no DNS name is replaced by a hash.
        """
        name = self.name
        if len(name) > _MAX_DNS_NAME or not all(map(_LABEL.fullmatch, name.split("."))):
            name = f"x-{hashlib.sha256(name.encode()).hexdigest()[:40]}"
        return f"{name}.{self.role}.{DOMAIN}"


def parse_identity(uri: str) -> Identity:
    """Return the identity in a URI.

    Raises:
        IdentityError: the URI has another form.

    """
    wrong = f"{uri[:200]!r} is no identity: expected {_SCHEME}FLEET/ROLE/NAME"
    fleet, _, rest = uri.removeprefix(_SCHEME).partition("/")
    role, _, name = rest.partition("/")
    if not uri.startswith(_SCHEME) or role not in set(Role):
        raise IdentityError(wrong)
    return Identity(fleet, Role(role), name)


def worker_id(name: str, number: int) -> str:
    """Return the id under which a worker of a gateway registers, counted from 1; they share the gateway's identity."""
    return name if number == 1 else f"{name}{_WORKER}{number}"


def name_of_gateway(id_: str) -> str:
    """Return the name in the certificate of a registered gateway, or of one of its workers."""
    return id_.partition(_WORKER)[0]
