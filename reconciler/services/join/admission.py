"""Admission of machines: issues the certificate, the labels and the store's password of one that may join.

The caller has decided that it may, by a token or by an administrator's approval, and which names it may have. Every step can
be repeated: a machine that lost the answer gets the same certificate again, with a new password.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Protocol

from identity.authority import AuthorityError, read_request, spki_hash
from identity.authority_folder import AuthorityFolder
from identity.names import Identity, IdentityError, Role
from identity.signer import Binding, IssueError, Signer, find_binding, name_taken
from machinery.clock import Clock
from manifests.plan import uid_of
from schemas.meta import Labels, ObjectMeta
from schemas.node import Node
from schemas.trust import FleetTrust, IssuedCertificate, RevokedCertificate
from schemas.wire.join import NAME_TAKEN, JoinAnswer, Machine
from store import codec, keys
from store.errors import ConflictError, NotFoundError
from store.etcd.users import Credentials
from store.mutate import mutate
from store.port import Guard, ModRevisionGuard, Transport

log = logging.getLogger(__name__)

_ATTEMPTS = 5


class AdmissionError(Exception):
    """A machine may not join as it asks; the message says why and what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SignerUnreadyError(Exception):
    """The reconciler cannot sign now; the message, for its operator, says why."""


class StoreAccounts(Protocol):
    """The users of the store (`store.etcd.accounts.JoinedAccounts`)."""

    async def are_required(self) -> bool: ...

    async def issue(self, component: str, name: str) -> Credentials: ...


class NameRight(Enum):
    """The names that a machine may have, by what it has proven. What it says of itself proves nothing."""

    NEW = auto()
    """A name that the fleet does not have: any token, any approval."""
    OWN_KEY = auto()
    """Also one with a certificate for the applicant's key, which it has proven to hold: the answer was lost."""
    ANY = auto()
    """Every name: a token for this name, or the proof of its current key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """A machine, its key, and the role and name that it asks for."""

    role: Role
    name: str
    right: NameRight
    machine: Machine
    request: bytes
    key_hash: str
    repeats_since: int | None = None
    """The store's revision of the token or the approval that gave a certificate before, perhaps; None: a first use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Issues identities of one fleet."""

    transport: Transport
    clock: Clock
    authority: AuthorityFolder
    accounts: StoreAccounts
    etcd: tuple[str, ...]
    """URLs of the store that machines get."""
    etcd_prefix: str = ""

    async def trust(self) -> FleetTrust:
        """Return the fleet's trust. Raises SignerUnreadyError, StoreError."""
        item = await self.transport.get(keys.FLEET_TRUST)
        if item is None:
            raise SignerUnreadyError("the fleet has no authorities yet; run `fleetctl secure`")
        return codec.decode(FleetTrust, item)

    def applicant(
        self, role: Role, name: str, machine: Machine, request: str, right: NameRight
    ) -> Applicant:
        """Return the applicant with its key. Raises AdmissionError: the request or the machine is not valid."""
        if role is Role.NODE and not machine.hardware_uuid:
            raise AdmissionError(
                "NoHardwareUuid",
                "a node needs a hardware UUID, by which the fleet knows a cloned disk, and this machine has sent none. On "
                "Linux systemd-machine-id-setup creates /etc/machine-id",
            )
        try:
            key_hash = spki_hash(read_request(request.encode())).hex()
        except AuthorityError as error:
            raise AdmissionError("InvalidRequest", str(error)) from error
        # Macs print it in upper case, other systems in lower case.
        machine = machine.model_copy(update={"hardware_uuid": machine.hardware_uuid.lower()})
        return Applicant(
            role=role,
            name=name,
            right=right,
            machine=machine,
            request=request.encode(),
            key_hash=key_hash,
        )

    async def check(self, applicant: Applicant, trust: FleetTrust) -> None:
        """Check all that can be checked before a token's use is counted.

        Raises:
            AdmissionError: the fleet has the name, and the applicant may not have it.
            SignerUnreadyError: the authority's key or root's password is not here.
            StoreError: the store did not answer.

        """
        await self._binding(self._identity(applicant, trust), applicant)
        self._signer(trust)
        await self.accounts.are_required()

    async def admit(
        self,
        applicant: Applicant,
        trust: FleetTrust,
        *,
        labels: Labels,
        guards: Sequence[Guard] = (),
    ) -> JoinAnswer:
        """Return all that the machine needs. `guards` must hold when its certificate is issued.

        Raises:
            AdmissionError: as `check`.
            ConflictError: a guard does not hold, or others kept issuing for this name.
            SignerUnreadyError, StoreError: as `check`.

        """
        identity = self._identity(applicant, trust)
        bound = await self._binding(identity, applicant)
        is_repeated = bound is not None and self._is_current(bound.record, applicant)
        if bound is not None and is_repeated:
            issued = bound.record
        else:
            version = () if bound is None else (bound.version,)
            issued = await self._sign(identity, applicant, trust, [*version, *guards])
        if applicant.role is Role.NODE and labels:
            await self._label(applicant.name, labels)
        account = Credentials(user="", password="")
        if await self.accounts.are_required():
            account = await self.accounts.issue(applicant.role, applicant.name)
        log.info("joined", extra={"identity": identity.uri, "repeated": is_repeated})
        return JoinAnswer(
            identity=identity.uri,
            fleet=trust.fleet,
            mode=trust.mode,
            certificate=issued.certificate,
            authorities=trust.authorities,
            etcd=self.etcd,
            etcd_prefix=self.etcd_prefix,
            etcd_user=account.user,
            etcd_password=account.password,
        )

    async def _sign(
        self,
        identity: Identity,
        applicant: Applicant,
        trust: FleetTrust,
        guards: Sequence[Guard],
    ) -> IssuedCertificate:
        try:
            return await self._signer(trust).issue(
                identity,
                applicant.request,
                hardware_uuid=applicant.machine.hardware_uuid,
                addresses=applicant.machine.addresses,
                guards=guards,
            )
        except IssueError as error:
            raise AdmissionError(NAME_TAKEN, str(error)) from error

    def _signer(self, trust: FleetTrust) -> Signer:
        try:
            authority = self.authority.signing(trust.authorities)
        except AuthorityError as error:
            raise SignerUnreadyError(str(error)) from error
        return Signer(transport=self.transport, clock=self.clock, authority=authority)

    def _identity(self, applicant: Applicant, trust: FleetTrust) -> Identity:
        try:
            return Identity(trust.fleet, applicant.role, applicant.name)
        except IdentityError as error:
            raise AdmissionError("InvalidRequest", str(error)) from error

    async def _binding(self, identity: Identity, applicant: Applicant) -> Binding | None:
        """Return the certificate of the name; None if it has none. Raises AdmissionError: the applicant may not have it."""
        binding = await find_binding(self.transport, identity)
        right, is_free = applicant.right, binding is None
        has_own_key = binding is not None and binding.record.key_hash == applicant.key_hash
        if binding is None and applicant.role is Role.NODE and right is not NameRight.ANY:
            # A node whose certificate was revoked, or that has none yet, keeps its name until it is deleted.
            is_free = await self.transport.get(keys.spec_key("Node", identity.name)) is None
        if not (is_free or right is NameRight.ANY or (right is NameRight.OWN_KEY and has_own_key)):
            raise AdmissionError(NAME_TAKEN, name_taken(identity))
        since = applicant.repeats_since
        if since is not None and not has_own_key and await self._is_over(identity, binding, since):
            raise AdmissionError(
                "Revoked",
                f"{identity.uri} was revoked, or given to another key, after this token or approval; join with a new one",
            )
        return binding

    async def _is_over(self, identity: Identity, found: Binding | None, since: int) -> bool:
        """Return whether the name was revoked or given away after a revision: what was used before it gives nothing more."""
        if found is not None:
            return found.version.mod_revision > since
        revoked = (await self.transport.list(keys.REVOKED_PREFIX)).items
        later = (item for item in revoked if item.mod_revision > since)
        return any(
            codec.decode(RevokedCertificate, item).identity == identity.uri for item in later
        )

    def _is_current(self, issued: IssuedCertificate, applicant: Applicant) -> bool:
        return issued.key_hash == applicant.key_hash and self.clock.now() < issued.not_after

    async def _label(self, name: str, labels: Labels) -> None:
        """Give the node the labels of its token, before its agent starts. A label that it has stays."""
        for _ in range(_ATTEMPTS):
            try:
                await mutate(
                    self.transport, self.clock, Node, name, lambda node: _labelled(node, labels)
                )
            except NotFoundError:
                put = codec.put_spec(_new_node(name, labels, self.clock.now()))
                try:
                    await self.transport.commit(
                        [ModRevisionGuard(key=put.key, mod_revision=0)], [put]
                    )
                except ConflictError:
                    continue  # the reconciler has registered it meanwhile
            return


def _new_node(name: str, labels: Labels, now: datetime) -> Node:
    metadata = ObjectMeta(
        name=name,
        labels=labels,
        uid=uid_of("Node", name, now),
        generation=1,
        creation_timestamp=now,
    )
    return Node(metadata=metadata)


def _labelled(node: Node, labels: Labels) -> Node | None:
    wanted = {**labels, **node.metadata.labels}
    if wanted == node.metadata.labels:
        return None
    metadata = node.metadata.model_copy(update={"labels": wanted})
    return node.model_copy(update={"metadata": metadata})
