"""Access to earlier moments for routes: parses `at`, and turns what is wrong into refusals."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, TypeVar

from dashboard.api.time_parameters import parse_time
from dashboard.history.moments import KnownTime, Moment, MomentReader, NoMomentError, ObjectChange
from dashboard.history.queries import ReadError
from machinery.clock import Clock
from schemas.wire.errors import Refusal, RefusedError
from store.port import KeyValue

T = TypeVar("T")
NO_HISTORY: Final = "This dashboard keeps no history. Start it with --state-dir FOLDER."


def no_history() -> RefusedError:
    """Return the refusal of a process without a history."""
    return RefusedError(Refusal(status=404, message=NO_HISTORY, code="no_history"))


def unreadable(error: ReadError) -> RefusedError:
    """Return the refusal of a read that failed."""
    message = f"The history cannot be read: {error}. See /health."
    refusal = Refusal(status=503, message=message, retry_after_s=5)
    return RefusedError(refusal)


@dataclass(frozen=True, slots=True)
class PastReader:
    """Reads what the history has of objects; without a reader, each method says that there is none."""

    reader: MomentReader | None
    clock: Clock

    async def moment(self, at: str) -> Moment:
        """Return the fleet at the time of a query. Raises RefusedError."""
        at_s = parse_time(at, "at", self.clock.now().timestamp())
        try:
            return await _readable(self._reader().at(at_s))
        except NoMomentError as error:
            message = f"Nothing is known of {at}. {error} GET /api/v1/history lists what is known."
            raise RefusedError(Refusal(status=404, message=message, code="not_recorded")) from error

    async def changes(self, kind: str, name: str, begin_s: float) -> list[ObjectChange]:
        """Return the changes of an object, newest first. Raises RefusedError."""
        return await _readable(self._reader().changes(kind, name, begin_s))

    async def documents(self, prefix: str, begin_s: float) -> list[KeyValue]:
        """Return the last document of every key below a prefix. Raises RefusedError."""
        return await _readable(self._reader().documents(prefix, begin_s))

    async def known(self, begin_s: float, end_s: float) -> list[KnownTime]:
        """Return the times that are known. Raises RefusedError."""
        return await _readable(self._reader().known(begin_s, end_s))

    def _reader(self) -> MomentReader:
        if self.reader is None:
            raise no_history()
        return self.reader


async def _readable(read: Awaitable[T]) -> T:
    try:
        return await read
    except ReadError as error:
        raise unreadable(error) from error
