"""References for golden answers that are made by nobody, after as long as a model takes. No process."""

from dataclasses import dataclass

from nodeagent.engines import EngineOrder
from nodeagent.hollow.engines import ANSWER, HollowEngines, path_of
from schemas.formation import Golden


@dataclass(slots=True, kw_only=True)
class HollowReferences:
    """Answers the golden question alone (`ReferencesPort`)."""

    engines: HollowEngines
    error: str = ""
    """Why it cannot; empty: it can."""
    made: int = 0
    """How often it was asked."""

    async def make(self, order: EngineOrder) -> Golden:
        """Return the answer, after as long as the model takes.

        Raises:
            OSError: `error` says so.

        """
        self.made += 1
        pace = self.engines.pace(path_of(order))
        await self.engines.clock.sleep(pace.load_s + pace.probe_s)
        if self.error:
            raise OSError(self.error)
        return ANSWER.model_copy(update={"is_reference": True})

    def sweep(self) -> None:
        """End nothing: what is made ends with who asked."""
