"""The agent's API as a part of the agent: where it listens, and what the node's status says of it."""

from collections.abc import Callable

from machinery.clock import Clock
from machinery.sidehttp import SideDoor
from nodeagent.api.app import make_app
from nodeagent.api.view import View
from schemas.meta import Condition, Truth, with_condition
from schemas.node import NodeStatus
from store.auth.tickets import Tickets
from store.port import Transport

SERVING = "ApiServing"


class ApiDoor:
    """The API of one agent."""

    def __init__(
        self, view: View, transport: Transport, *, port: int, on_change: Callable[[], None]
    ) -> None:
        self._clock: Clock = view.clock
        tickets = Tickets(transport, view.clock, f"Node/{view.name}")
        self._door = SideDoor(
            make_app(view, tickets),
            view.clock,
            (view.host, port),
            self._noted(on_change),
        )
        self._condition: Condition | None = None

    def _noted(self, on_change: Callable[[], None]) -> Callable[[], None]:
        def changed() -> None:
            self._condition = self._judged()
            on_change()

        return changed

    def _judged(self) -> Condition | None:
        """Return what keeps it from answering; None while nothing does."""
        if not self._door.why:
            return None
        return Condition(
            type=SERVING,
            status=Truth.FALSE,
            reason="PortTaken",
            message=f"{self._door.why}. Models are served all the same; for logs and figures start the agent with "
            "another --api-port, or end who listens there",
            last_transition_time=self._clock.now(),
        )

    async def run(self) -> None:
        """Answer for ever."""
        await self._door.run()

    def fill(self, status: NodeStatus) -> NodeStatus:
        """Return the status with where the API answers, or why it does not."""
        conditions = status.conditions
        if self._condition is not None:
            conditions = with_condition(conditions, self._condition)
        return status.model_copy(update={"agent_url": self._door.url, "conditions": conditions})
