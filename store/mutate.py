"""Read-modify-write of one document, safe against concurrent writers and lost answers.

A write whose answer was lost is never repeated blindly. It names the revision it is based on, so it is either the
first change after that revision or it was not applied: etcd's history tells which.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from machinery.backoff import Backoff
from machinery.clock import Clock
from schemas.meta import ApiObject, Status
from store import codec, keys
from store.errors import (
    CompactedError,
    ConflictError,
    FencedError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from store.port import Guard, ModRevisionGuard, Put, Transport

T = TypeVar("T")
Obj = TypeVar("Obj", bound=ApiObject)

# Long enough for eight writers of one key to take turns, and for etcd to elect another leader.
_ATTEMPTS = 10
_BACKOFF = Backoff(first_s=0.02, limit_s=1.0)
_HISTORY_S = 5.0


async def mutate(
    transport: Transport,
    clock: Clock,
    kind: type[Obj],
    name: str,
    change: Callable[[Obj], Obj | None],
    *,
    guards: Sequence[Guard] = (),
) -> Obj:
    """Change an object, except its status; return the object as it is in the store afterwards.

    `change` is pure, and is called again with the current object when others wrote meanwhile; None means that
    there is nothing to do. It increments `metadata.generation` itself. `guards` must hold as well, such as the
    fence of a leadership. Two writers that make the same document from the same version count as one: counters
    need an identity in the document.

    Raises:
        NotFoundError: there is no such object.
        FencedError: one of `guards` does not hold.
        ConflictError: others kept changing the object.
        UnknownOutcomeError: it may have been written, and the history no longer tells.
        UnavailableError: the store did not answer; if `ambiguous`, it may have been written.
        UndecodableError: this process cannot read the object; nothing was written.

    """
    key = keys.spec_key(kind.__name__, name)

    async def read() -> _Plan[Obj]:
        item = await transport.get(key)
        if item is None:
            raise NotFoundError(f"there is no {kind.__name__} {name}")
        current = codec.decode_object(kind, item)
        wanted = change(current)
        value = item.value if wanted is None else codec.encode_spec(wanted)
        return _Plan(
            current=current,
            raw=item.value,
            put=Put(key=key, value=value, lease=item.lease) if value != item.value else None,
            on=(ModRevisionGuard(key=key, mod_revision=item.mod_revision),),
            written=lambda revision: codec.with_version(wanted or current, revision),
        )

    return await _Change(transport, clock, read, guards).carry_out()


async def mutate_status(
    transport: Transport,
    clock: Clock,
    kind: type[Obj],
    name: str,
    change: Callable[[Obj], Status | None],
    *,
    guards: Sequence[Guard] = (),
) -> Obj:
    """Change an object's status; return the object as it is in the store afterwards.

    `change` gets the object with its status and returns the new status, under the rules of `mutate`, which also
    lists the errors. The status is written only if the spec is still the one that `change` got.
    """
    spec_key, status_key = keys.spec_key(kind.__name__, name), keys.status_key(kind.__name__, name)

    async def read() -> _Plan[Obj]:
        item, status = await transport.get(spec_key), await transport.get(status_key)
        if item is None:
            raise NotFoundError(f"there is no {kind.__name__} {name}")
        current = codec.with_status(codec.decode_object(kind, item), status)
        wanted = change(current)
        value = None if wanted is None else codec.encode(wanted)
        is_news = value is not None and (status is None or status.value != value)
        return _Plan(
            current=current,
            raw=status.value if status is not None else None,
            put=Put(key=status_key, value=value) if value is not None and is_news else None,
            on=(
                ModRevisionGuard(key=status_key, mod_revision=status.mod_revision if status else 0),
                ModRevisionGuard(key=spec_key, mod_revision=item.mod_revision),
            ),
            written=lambda _: current.model_copy(update={"status": wanted}),
        )

    return await _Change(transport, clock, read, guards).carry_out()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan(Generic[T]):
    """The state that was read, and the write based on it; `put` is None if nothing is to be written."""

    current: T
    raw: bytes | None
    """The document to write, as it was read; None if it does not exist yet."""
    put: Put | None
    on: tuple[ModRevisionGuard, ...]
    """The versions that the write is based on, that of the document first."""
    written: Callable[[int], T]
    """Returns the object in the store after a write at the given revision."""


class _Change(Generic[T]):
    """One change in progress."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        read: Callable[[], Awaitable[_Plan[T]]],
        guards: Sequence[Guard],
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._read = read
        self._guards = guards
        self._in_doubt: _Plan[T] | None = None
        self._refused: _Plan[T] | None = None

    async def carry_out(self) -> T:
        """Read and write until it is done; `mutate` lists the errors."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._try()
            except (FencedError, UnknownOutcomeError):
                raise
            except (ConflictError, UnavailableError) as error:
                if attempt == _ATTEMPTS:
                    raise self._given_up(error) from error
            await self._clock.sleep(_BACKOFF.delay_s(attempt, jitter=random.random()))
        raise AssertionError("unreachable")

    async def _try(self) -> T:
        plan = await self._read()
        if self._in_doubt is not None and await self._was_written(self._in_doubt, plan):
            return plan.current
        if self._guards and self._refused is not None and self._refused.on == plan.on:
            raise FencedError("the data is unchanged, so another guard does not hold")
        if plan.put is None:
            return plan.current
        try:
            revision = await self._transport.commit([*plan.on, *self._guards], [plan.put])
        except ConflictError:
            self._refused = plan
            raise
        except UnavailableError as error:
            if error.ambiguous:
                self._in_doubt = plan
            raise
        return plan.written(revision)

    async def _was_written(self, doubt: _Plan[T], now: _Plan[T]) -> bool:
        """Return whether the write in doubt was applied, by the first change after its base revision."""
        before, put = doubt.on[0], doubt.put
        assert put is not None
        if now.on[0] == before:
            return False  # not yet; if it arrives late, one of the two writes is refused
        if now.raw == put.value:
            return True
        if before.mod_revision == 0:
            raise UnknownOutcomeError(_unknown(before.key, "the key did not exist before"))
        was_first = await self._first_value_after(before) == put.value
        self._in_doubt = None
        return was_first

    async def _first_value_after(self, before: ModRevisionGuard) -> bytes | None:
        """Return the value of the first write after the revision; None if that was a deletion."""
        watch = self._transport.watch(before.key, after_revision=before.mod_revision)
        try:
            async with asyncio.timeout(_HISTORY_S), aclosing(watch):
                async for batch in watch:
                    for change in batch.changes:
                        if change.key == before.key:
                            return None if change.now is None else change.now.value
        except CompactedError as error:
            raise UnknownOutcomeError(_unknown(before.key, str(error))) from error
        except TimeoutError:
            pass
        raise UnavailableError(f"the store does not tell whether {before.key} was written")

    def _given_up(
        self, error: ConflictError | UnavailableError
    ) -> ConflictError | UnavailableError:
        if self._in_doubt is not None:
            return UnavailableError(f"{error} (after {_ATTEMPTS} attempts)", ambiguous=True)
        if isinstance(error, UnavailableError):
            return UnavailableError(f"{error} (after {_ATTEMPTS} attempts)")
        return ConflictError(f"others changed it {_ATTEMPTS} times in a row")


def _unknown(key: str, why: str) -> str:
    return (
        f"whether {key} was written cannot be known: the answer was lost, others wrote since, and "
        f"the history in between is gone ({why}). Read it, and decide again"
    )
