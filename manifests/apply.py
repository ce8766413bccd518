"""Carrying out an apply: look, check everything, write. Decides nothing: `plan` and `validate` do.

Nothing is written unless everything is valid. Every write names the version that was read; a conflict
or a lost answer means to look again, never to write again blindly.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from machinery.backoff import Backoff
from machinery.clock import Clock
from manifests import plan
from manifests.errors import ApplyError, ManifestErrors, names
from manifests.load import Loaded
from manifests.observe import Observed, observe
from manifests.plan import Change, Configured, Created, Unchanged, Write
from manifests.tree import key_of
from manifests.validate import validate
from schemas.meta import ApiObject, ObjectKey
from store import codec
from store.errors import ConflictError, StoreError, UnavailableError
from store.port import Transport

_ATTEMPTS = 5
_IN_FLIGHT = 4
# Long enough for etcd to elect another leader between the second attempt and the last.
_BACKOFF = Backoff(first_s=0.2, limit_s=2.0)

Result: TypeAlias = Literal["created", "configured", "unchanged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one object."""

    obj: ApiObject
    """As it is in the store now."""
    result: Result


async def prepare(transport: Transport, loaded: Sequence[Loaded], clock: Clock) -> list[Change]:
    """Return what an apply would do; writes nothing.

    Raises:
        ManifestErrors: everything that stands against it.
        StoreError: the store could not be read.

    """
    seen = await observe(transport, [item.key for item in loaded])
    return _checked(loaded, seen, clock)


async def apply(transport: Transport, loaded: Sequence[Loaded], clock: Clock) -> list[Outcome]:
    """Write what is declared; return what became of each object, in the order of `loaded`.

    Raises:
        ManifestErrors: something is not valid; nothing was written.
        ApplyError: writing stopped on its way; it says what was written.
        StoreError: the store could not be read; nothing was written.

    """
    changes = await prepare(transport, loaded, clock)
    run = _Run(transport, loaded, clock)
    await run.write(changes)
    return [run.outcomes[item.key] for item in loaded]


def _checked(loaded: Sequence[Loaded], seen: Observed, clock: Clock) -> list[Change]:
    problems = [*validate(loaded, seen.known), *plan.refusals(loaded, seen.objects)]
    if problems:
        raise ManifestErrors(problems)
    return plan.plan_changes(loaded, seen.objects, now=clock.now())


class _Run:
    """One apply on its way: what was written so far, and what went wrong."""

    def __init__(self, transport: Transport, loaded: Sequence[Loaded], clock: Clock) -> None:
        self.outcomes: dict[ObjectKey, Outcome] = {}
        self._transport = transport
        self._loaded = loaded
        self._clock = clock
        self._failures: list[StoreError | ManifestErrors | codec.UndecodableError] = []

    async def write(self, changes: Sequence[Change]) -> None:
        """Write wave after wave; stop before the next one when something went wrong."""
        for change in changes:
            if isinstance(change, Unchanged):
                self._note(change.obj, "unchanged")
        for wave in plan.waves(changes):
            slots = asyncio.Semaphore(_IN_FLIGHT)
            async with asyncio.TaskGroup() as group:
                for batch in wave:
                    group.create_task(self._in_turn(slots, batch))
            if self._failures:
                raise self._error(changes) from self._failures[0]

    async def _in_turn(self, slots: asyncio.Semaphore, batch: Sequence[Write]) -> None:
        """Write a batch when its turn comes; what fails is kept, so that the others can end well."""
        async with slots:
            if self._failures:
                return
            try:
                await self._write(batch)
            except (StoreError, ManifestErrors, codec.UndecodableError) as error:
                self._failures.append(error)

    async def _write(self, batch: Sequence[Write]) -> None:
        pending = batch
        for attempt in range(1, _ATTEMPTS + 1):
            failure = await self._commit(pending)
            if failure is None:
                return
            if isinstance(failure, UnavailableError):
                await self._clock.sleep(_BACKOFF.delay_s(attempt))
            before, pending = pending, await self._look_again(pending, failure)
            if not pending:
                return
            if attempt == _ATTEMPTS:
                raise _given_up(failure, before, pending) from failure

    async def _commit(self, writes: Sequence[Write]) -> ConflictError | UnavailableError | None:
        """Write all in one transaction; return why it may not have happened."""
        guards = [codec.unchanged(write.obj) for write in writes]
        try:
            puts = [codec.put_spec(write.obj) for write in writes]
            revision = await self._transport.commit(guards, puts)
        except (ConflictError, UnavailableError) as error:
            return error
        for write in writes:
            self._note(codec.with_version(write.obj, revision), _result(write))
        return None

    async def _look_again(
        self, pending: Sequence[Write], failure: ConflictError | UnavailableError
    ) -> Sequence[Write]:
        """Return what is still to be written, against what the store has now.

        What the store has as declared counts as written: by us, if the answer was lost.
        """
        try:
            seen = await observe(self._transport, [item.key for item in self._loaded])
        except UnavailableError:
            return pending  # guards keep the old plan from overwriting anything
        wanted = {key_of(write.obj): write for write in pending}
        again: list[Write] = []
        for change in _checked(self._loaded, seen, self._clock):
            earlier = wanted.get(key_of(change.obj))
            if earlier is None:
                continue
            if not isinstance(change, Unchanged):
                again.append(change)
            else:
                lost = isinstance(failure, UnavailableError)
                self._note(change.obj, _result(earlier if lost else change))
        return again

    def _note(self, obj: ApiObject, result: Result) -> None:
        self.outcomes[key_of(obj)] = Outcome(obj=obj, result=result)

    def _error(self, changes: Sequence[Change]) -> ApplyError | ManifestErrors:
        due = [key_of(change.obj) for change in changes if not isinstance(change, Unchanged)]
        written = [key for key in due if key in self.outcomes]
        first = self._failures[0]
        if isinstance(first, ManifestErrors) and not written:
            return first
        missing = [key for key in due if key not in self.outcomes]
        return ApplyError(str(first), written=written, missing=missing)


def _result(change: Change) -> Result:
    match change:
        case Created():
            return "created"
        case Configured():
            return "configured"
        case Unchanged():
            return "unchanged"
        case _:
            assert_never(change)


def _given_up(
    failure: ConflictError | UnavailableError, before: Sequence[Write], after: Sequence[Write]
) -> StoreError:
    if isinstance(failure, UnavailableError):
        return UnavailableError(f"the store did not answer: {failure}", ambiguous=failure.ambiguous)
    versions = {key_of(w.obj): w.obj.metadata.resource_version for w in before}
    moved = [
        key_of(w.obj) for w in after if versions[key_of(w.obj)] != w.obj.metadata.resource_version
    ]
    what = names(moved) or "what is to be written"
    return ConflictError(f"{what} was changed by others {_ATTEMPTS} times in a row")
