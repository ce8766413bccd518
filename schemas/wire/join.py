"""The join port of a reconciler: what a machine that joins sends, and what it gets (POST /v1/join, /v1/rejoin, /v1/requests).

Bodies come from unknown machines: every field has a limit.
"""

from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from schemas.meta import ApiModel, ObjectName
from schemas.trust import (
    Address,
    FleetUid,
    HardwareUuid,
    JoinTokenId,
    Pem,
    RequestId,
    ShortText,
    TlsMode,
)

CA_PATH: Final = "/v1/ca"
JOIN_PATH: Final = "/v1/join"
REJOIN_PATH: Final = "/v1/rejoin"
REQUESTS_PATH: Final = "/v1/requests"
DEFAULT_PORT: Final = 4002
MAX_BODY_BYTES: Final = 32 << 10
"""The largest body of a request."""
MAX_ANSWER_BYTES: Final = 1 << 20
MAX_CLOCK_OFFSET_S: Final = 60.0
"""The largest difference of the clocks of a machine that joins and of the fleet: certificates need the right time."""
NAME_TAKEN: Final = "NameTaken"
"""The code of a refusal, and the reason of its event: the fleet has the name, and the machine has no right to it."""
POLL_S: Final = 3.0
"""The time between two questions of a machine that waits for its approval."""

SigningRequest = Annotated[str, StringConstraints(max_length=8 << 10)]


class AuthorityAnswer(ApiModel):
    """The answer to GET /v1/ca, which proves nothing by itself: the machine compares the authority's hash."""

    authorities: Pem
    """Certificates in PEM; the first one signs."""
    identity: Annotated[str, StringConstraints(max_length=300)]
    """The URI of the reconciler that answers, which its certificate must have."""


class Machine(ApiModel):
    """The description that a machine gives of itself."""

    name: ObjectName | None = None
    """The name that a person chose; None: the token's, or else `default_name`."""
    default_name: ObjectName
    """A name made of the host name."""
    hardware_uuid: HardwareUuid
    addresses: Annotated[tuple[Address, ...], Field(max_length=16)] = ()


class JoinBody(ApiModel):
    """The body of POST /v1/join."""

    id: JoinTokenId
    secret: Annotated[str, StringConstraints(pattern=r"^[a-z2-7]{26}$")] = Field(repr=False)
    request: SigningRequest
    """The request for a certificate (PKCS#10, PEM); its key was made on the machine."""
    machine: Machine


class RejoinBody(ApiModel):
    """The body of POST /v1/rejoin, over a connection with the machine's certificate."""

    request: SigningRequest
    machine: Machine


class JoinAnswer(ApiModel):
    """All that a machine needs to be a part of the fleet."""

    identity: Annotated[str, StringConstraints(max_length=300)]
    fleet: FleetUid
    mode: TlsMode
    certificate: Pem
    authorities: Pem
    etcd: tuple[Address, ...] = ()
    """URLs of the store."""
    etcd_prefix: Address = ""
    etcd_user: Annotated[str, StringConstraints(max_length=300)] = ""
    """The user of the store; empty if it requires no passwords."""
    etcd_password: ShortText = Field(default="", repr=False)


class PendingBody(ApiModel):
    """The body of POST /v1/requests: a machine without a token asks to join."""

    request: SigningRequest
    machine: Machine
    chip: ShortText = ""
    memory_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 0


class PendingAnswer(ApiModel):
    """The state of a request. The machine shows the code that it computes itself, never one that it is sent."""

    id: RequestId
    state: Literal["Pending", "Denied", "Issued", "Ended"]
    answer: JoinAnswer | None = None
    """The certificate and the rest, once the request is approved."""
    message: Annotated[str, StringConstraints(max_length=1000)] = ""


class JoinRefusal(ApiModel):
    """The body of every refusal."""

    code: ShortText
    """One CamelCase word for machines."""
    message: Annotated[str, StringConstraints(max_length=2000)]
    """One sentence for people, with what to do."""
