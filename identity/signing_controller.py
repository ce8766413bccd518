"""The control loop of a signer: answers the requests for certificates in the store.

A request at `csr/<role>/<name>` becomes a certificate at `trust/issued/<role>/<name>`, or a refusal with its reason at
`trust/refused/<role>/<name>`; it is deleted in the same transaction. Any number of signers may run: guards decide
between them, and none of them has to lead. Each role has a queue of its own with a bounded rate, so that one that asks
too often delays its own kind only.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Final, TypeVar

from identity.authority import LEAF_LIFETIME, AuthorityError
from identity.authority_exchange import drop_old_authority
from identity.authority_folder import AuthorityFolder
from identity.credentials import GRACE
from identity.first_requests import check_first_request
from identity.names import Identity, IdentityError, Role
from identity.proof import request_hash
from identity.signer import IssueError, Signer
from machinery.clock import Clock
from machinery.control_loop import Requeue, WorkQueue, run_loop
from schemas.meta import ApiModel
from schemas.trust import (
    CertificateRequest,
    FleetTrust,
    RefusedRequest,
    RevokedCertificate,
)
from store import codec, keys
from store.errors import ConflictError, StoreError, UndecodableError
from store.informer import Informer
from store.port import Delete, KeyValue, ModRevisionGuard, Operation, Put, Transport

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES: Final = 32 << 10
MAX_REQUESTS: Final = 2000
"""While more of one role wait, requests are deleted unanswered; a process that is still there asks again."""
_BETWEEN_ANSWERS_S = 0.02
"""A P-256 signature takes 2 ms: a queue takes a tenth of a core at most."""
REFUSAL_LIFETIME: Final = timedelta(minutes=10)
SWEEP_S: Final = 60.0
_NO_KEY_RETRY_S = 30.0
_MAX_WHY = 1000

M = TypeVar("M", bound=ApiModel)


class SigningController:
    """Answers requests for the certificates of one fleet. Run `run()` in a task group."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        folder: AuthorityFolder,
        *,
        lifetime: timedelta = LEAF_LIFETIME,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._folder = folder
        self._lifetime = lifetime
        self._queues = {role: WorkQueue[str](clock) for role in Role}
        # Keys only: a flood of large requests is not held in memory.
        self._requests = Informer(transport, keys.REQUEST_PREFIX, lambda _: None, clock)
        self._requests.on_change(self._asked)
        self._fleet = Informer(
            transport, keys.FLEET_TRUST, lambda item: codec.decode(FleetTrust, item), clock
        )
        self._fleet.on_change(lambda _: self._ask_again())

    async def run(self) -> None:
        """Answer requests forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fleet.run())
            await self._fleet.wait_synced()
            group.create_task(self._requests.run())
            group.create_task(self._sweep_forever())
            for role, queue in self._queues.items():
                group.create_task(run_loop(queue, self._answerer(role), transient=(StoreError,)))

    def _asked(self, key: str) -> None:
        role, _ = keys.role_and_name(keys.REQUEST_PREFIX, key)
        if role in set(Role):
            self._queues[Role(role)].add(key)

    def _ask_again(self) -> None:
        for key in self._requests.items:
            self._asked(key)

    def _answerer(self, role: Role) -> Callable[[str], Coroutine[Any, Any, Requeue | None]]:
        async def answer(key: str) -> Requeue | None:
            if key not in self._requests.items:
                return None
            found = await self._transport.get(key)
            if found is None:
                return None
            if len(self._queues[role]) >= MAX_REQUESTS:
                log.warning("request for a certificate deleted: too many wait", extra={"key": key})
                await self._commit(found, [])
                return None
            await self._clock.sleep(_BETWEEN_ANSWERS_S)
            with contextlib.suppress(ConflictError):  # another signer, or a newer request
                return await self._answer(role, found)
            return None

        return answer

    async def _answer(self, role: Role, item: KeyValue) -> Requeue | None:
        fleet = self._fleet.items.get(keys.FLEET_TRUST)
        if fleet is None:
            return None  # asked again when it is there
        _, name = keys.role_and_name(keys.REQUEST_PREFIX, item.key)
        try:
            identity = Identity(fleet.fleet, role, name)
        except IdentityError as error:
            log.warning("request for a certificate deleted", extra={"why": str(error)})
            await self._commit(item, [])
            return None
        try:
            authority = self._folder.signing(fleet.authorities)
        except AuthorityError as error:
            # A person must act, or another signer has the key.
            log.warning("request for a certificate waits", extra={"why": str(error)})
            return Requeue(after_s=_NO_KEY_RETRY_S)
        signer = Signer(
            transport=self._transport,
            clock=self._clock,
            authority=authority,
            lifetime=self._lifetime,
        )
        try:
            await self._issue(signer, identity, item)
        except (IssueError, UndecodableError) as error:
            why = str(error)
            log.warning("certificate refused", extra={"identity": identity.uri, "why": why})
            refusal = RefusedRequest(
                request_hash=_request_hash(item), why=why[:_MAX_WHY], refused=self._clock.now()
            )
            key = keys.refused_key(identity.role, identity.name)
            await self._commit(item, [Put(key=key, value=codec.encode(refusal))])
        return None

    async def _issue(self, signer: Signer, identity: Identity, item: KeyValue) -> None:
        if len(item.value) > MAX_REQUEST_BYTES:
            raise IssueError(f"the request is larger than {MAX_REQUEST_BYTES >> 10} KiB")
        asked = codec.decode(CertificateRequest, item)
        answered = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
        operations = [
            Delete(key=item.key),
            Delete(key=keys.refused_key(identity.role, identity.name)),
        ]
        if asked.proof:
            issued = await signer.renew(identity, asked, guards=[answered], operations=operations)
        else:
            allowed = await check_first_request(self._transport, identity, asked)
            issued = await signer.issue(
                identity,
                asked.request.encode(),
                hardware_uuid=asked.hardware_uuid,
                addresses=asked.addresses,
                guards=[*allowed, answered],
                operations=operations,
            )
        log.info(
            "certificate issued",
            extra={
                "identity": identity.uri,
                "serial": issued.serial,
                "until": issued.not_after.isoformat(),
                "is_first": not asked.proof,
            },
        )

    async def _commit(self, item: KeyValue, operations: list[Operation]) -> None:
        """Delete a request that was answered."""
        guard = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
        await self._transport.commit([guard], [Delete(key=item.key), *operations])

    async def _sweep_forever(self) -> None:
        while True:
            with contextlib.suppress(StoreError, UndecodableError):  # the next one is in a minute
                await sweep(self._transport, self._clock)
                await drop_old_authority(self._transport, self._clock)
            await self._clock.sleep(SWEEP_S)


def _request_hash(item: KeyValue) -> str:
    try:
        return request_hash(codec.decode(CertificateRequest, item).request)
    except UndecodableError:
        return hashlib.sha256(item.value).hexdigest()


async def sweep(transport: Transport, clock: Clock) -> None:
    """Delete revocations of certificates that no process accepts any more, and old refusals. Raises StoreError."""
    now = clock.now()
    for item in (await transport.list(keys.REVOKED_PREFIX)).items:
        entry = _decoded(RevokedCertificate, item)
        # While the store is away, processes accept certificates for some days after their end.
        if entry is not None and entry.not_after + GRACE < now:
            await _delete(transport, item)
    for item in (await transport.list(keys.REFUSED_PREFIX)).items:
        refusal = _decoded(RefusedRequest, item)
        if refusal is None or refusal.refused + REFUSAL_LIFETIME < now:
            await _delete(transport, item)


def _decoded(model: type[M], item: KeyValue) -> M | None:
    try:
        return codec.decode(model, item)
    except UndecodableError:
        return None


async def _delete(transport: Transport, item: KeyValue) -> None:
    guard = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
    with contextlib.suppress(ConflictError):
        await transport.commit([guard], [Delete(key=item.key)])
