"""The gateways of a command, tried in turn: the one that worked is tried first the next time."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import click

from fleetctl.chat.answer_stream import (
    GatewayAccess,
    GatewayLostError,
    GatewayUnreachableError,
)
from fleetctl.cli.errors import FleetctlError
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock

# A gateway that others can replace gets less time for a connection.
_CONNECT_S = 2.0
# A supervisor starts a dead gateway again within this time; see docs/operations/gateway.md.
_RESEND_S: Final = 15.0
_RESEND_BACKOFF = Backoff(first_s=0.2, limit_s=1.0)

T = TypeVar("T")
Say = Callable[[str], None]
Request = Callable[[GatewayAccess], Awaitable[T]]


def print_note(text: str) -> None:
    """Print a line on stderr."""
    click.echo(text, err=True)


class GatewayPool:
    """Sends requests to the first gateway that accepts a connection."""

    def __init__(
        self,
        gateways: Sequence[GatewayAccess],
        clock: Clock,
        *,
        find_others: Callable[[], Awaitable[Sequence[GatewayAccess]]] | None = None,
    ) -> None:
        """`gateways`: at least one, in the order of use; `find_others` is called once, when none of them answers."""
        self._gateways = list(gateways)
        self._clock = clock
        self._find_others = find_others

    @property
    def url(self) -> str:
        """The URL of the gateway that is tried first."""
        return self._gateways[0].url

    async def send(
        self,
        request: Request[T],
        *,
        can_resend: Callable[[], bool] = lambda: True,
        say: Say = print_note,
    ) -> T:
        """Return the result of `request` with the first gateway that accepts a connection.

        If a gateway dies after that, the request is sent again while `can_resend` returns True, for 15 s in all.

        Raises:
            FleetctlError: no gateway answers, or the gateway refuses the request.
            GatewayLostError: the gateway died, and the request may not be sent again.

        """
        retries = Retries(_RESEND_BACKOFF, self._clock)
        deadline_s = 0.0
        while True:
            try:
                return await self._send_once(request, say)
            except GatewayLostError as error:
                url = error.url
                self._gateways.sort(key=lambda gateway: gateway.url == url)
                if not can_resend():
                    raise
                if not deadline_s:
                    deadline_s = self._clock.monotonic() + _RESEND_S
                elif self._clock.monotonic() >= deadline_s:
                    raise
                say(f"{error.format_message()}. Sending the request again")
            except FleetctlError as error:
                # Right after its death, a gateway may be starting again.
                is_over = not deadline_s or self._clock.monotonic() >= deadline_s
                if is_over or not isinstance(error, GatewayUnreachableError):
                    raise
            await retries.wait()

    async def _send_once(self, request: Request[T], say: Say) -> T:
        """Send the request to each gateway until one accepts the connection. Raises GatewayUnreachableError."""
        failed: list[GatewayUnreachableError] = []
        while (access := await self._next(len(failed))) is not None:
            if failed:
                say(f"{failed[-1].summary}; using {access.url}")
            try:
                result = await request(access)
            except GatewayUnreachableError as error:
                failed.append(error)
                continue
            self._gateways.sort(key=lambda gateway: gateway.url != access.url)
            return result
        if len(failed) == 1:
            raise failed[0]
        summaries = "; ".join(error.summary for error in failed)
        raise GatewayUnreachableError(
            f"no gateway answers: {summaries}. Are they running? "
            "Give another address with --gateway or FLEET_GATEWAY",
            summary=summaries,
        )

    async def _next(self, number: int) -> GatewayAccess | None:
        """Return the gateway to try after `number` others; None after the last one."""
        if number >= len(self._gateways) and self._find_others is not None:
            find_others, self._find_others = self._find_others, None
            self._gateways += await find_others()
        if number >= len(self._gateways):
            return None
        access = self._gateways[number]
        is_last = number == len(self._gateways) - 1 and self._find_others is None
        return access if is_last else replace(access, connect_s=_CONNECT_S)
