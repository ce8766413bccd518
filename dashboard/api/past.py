"""Access to earlier moments for routes: parses `at`, and turns what is wrong into refusals."""

from dataclasses import dataclass

from dashboard.api.time_parameters import parse_time
from dashboard.history.moments import Moment, MomentReader, NoMomentError
from machinery.clock import Clock
from schemas.wire.errors import RefusedError, refused


def no_history() -> RefusedError:
    """Return the refusal of a process without a history."""
    message = "This dashboard keeps no history. Start it with --state-dir FOLDER."
    return refused(404, message, "no_history")


@dataclass(frozen=True, slots=True)
class PastReader:
    """Reads what the history has of objects."""

    known: MomentReader | None
    """None without a history."""
    clock: Clock

    @property
    def reader(self) -> MomentReader:
        """The reader of the history. Raises RefusedError: there is no history."""
        if self.known is None:
            raise no_history()
        return self.known

    async def moment(self, at: str) -> Moment:
        """Return the fleet at the time of a query. Raises RefusedError."""
        at_s = parse_time(at, "at", self.clock.now().timestamp())
        try:
            return await self.reader.at(at_s)
        except NoMomentError as error:
            message = f"Nothing is known of {at}. {error} GET /api/v1/history lists what is known."
            raise refused(404, message, "not_recorded") from error
