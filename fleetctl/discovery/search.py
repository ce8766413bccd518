"""The search for a fleet: asks the sources again and again, and goes on with the addresses that TLS proves."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fleetctl.cli.errors import FleetctlError
from fleetctl.discovery.suggestions import Suggestion, SuggestionSource, collect
from fleetctl.fleets import join_client
from fleetctl.fleets.join_client import JoinAddress
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock

_BACKOFF: Final = Backoff(first_s=1.0, limit_s=15.0)
MAX_TRIED: Final = 16
"""Most addresses that one round tries; the rest of a flood of announcements is ignored."""
_TRY_S: Final = 8.0
_MAX_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFleet:
    """A fleet whose join ports have proven its authority."""

    authority_hash: bytes
    addresses: tuple[JoinAddress, ...]

    @property
    def title(self) -> str:
        """The fleet in an error: its authority and its addresses."""
        where = ", ".join(
            address.url.removeprefix("https://") for address in self.addresses[:_MAX_SHOWN]
        )
        return f"{self.authority_hash.hex()[:12]} at {where}"


class FleetSearch:
    """Finds the fleet of a token, or the only one there is."""

    def __init__(
        self, sources: Sequence[SuggestionSource], clock: Clock, authority_hash: bytes | None
    ) -> None:
        """`authority_hash`: the one in the token; None: any fleet, which an administrator has to approve."""
        self._sources = sources
        self._clock = clock
        self._expected = authority_hash
        self._problems: dict[str, None] = {}
        self._failures: dict[JoinAddress, str] = {}

    async def find(self, limit_s: float) -> FoundFleet:
        """Return the fleet, once one is found.

        Raises:
            FleetctlError: none is found in time, or several are.

        """
        retries, end = Retries(_BACKOFF, self._clock), self._clock.monotonic() + limit_s
        while True:
            # Seeds come first, and are enough: nothing else is waited for while one of them answers.
            fleets = await self._look("seeds") or await self._look("mdns", "tailscale")
            if len(fleets) > 1:
                raise FleetctlError(_several(fleets))
            if fleets:
                return fleets[0]
            wait_s = retries.next_delay_s()
            if self._clock.monotonic() + wait_s >= end:
                raise FleetctlError(self._nothing(limit_s))
            await self._clock.sleep(wait_s)

    async def _look(self, *names: str) -> list[FoundFleet]:
        """Return the fleets that answer at the addresses of some sources."""
        heard = await collect([source for source in self._sources if source.name in names])
        self._problems |= dict.fromkeys(heard.problems)
        addresses = list(
            dict.fromkeys(map(_address, filter(self._is_candidate, heard.suggestions)))
        )
        async with asyncio.TaskGroup() as group:
            tasks = {
                join_address: group.create_task(self._proven(join_address), name=join_address.url)
                for join_address in addresses[:MAX_TRIED]
            }
        fleets: dict[bytes, list[JoinAddress]] = {}
        for address, task in tasks.items():
            if (authority := task.result()) is not None:
                fleets.setdefault(authority, []).append(address)
        return [
            FoundFleet(authority_hash=fleet, addresses=tuple(fleets[fleet]))
            for fleet in sorted(fleets)
        ]

    def _is_candidate(self, one: Suggestion) -> bool:
        if self._expected is None:
            return one.role == "control"
        return one.may_belong_to(self._expected)

    async def _proven(self, address: JoinAddress) -> bytes | None:
        """Return the authority that has certified the server at an address; None if it proves none."""
        try:
            async with asyncio.timeout(_TRY_S):
                return await join_client.prove(address, self._expected, self._clock)
        except TimeoutError:
            self._failures[address] = f"{address.url} does not answer"
        except FleetctlError as error:
            self._failures[address] = str(error).partition("\n")[0][:300]
        return None

    def _nothing(self, limit_s: float) -> str:
        """Return the sentence about a search that found nothing."""
        whose = "no fleet" if self._expected is None else "the fleet of this token"
        verb = "was found" if self._expected is None else "was not found"
        details = [*self._failures.values(), *self._problems][:_MAX_SHOWN]
        why = "".join(f"\n  {detail}" for detail in details)
        return (
            f"{whose} {verb} within {limit_s:g} s. Give the address of a reconciler's join port: fleetctl join ... HOST:4002. "
            f"`fleetctl discover` lists what is heard; some networks drop multicast{why}"
        )


def _address(suggestion: Suggestion) -> JoinAddress:
    return suggestion.address


def _several(found: Sequence[FoundFleet]) -> str:
    titles = "".join(f"\n  {fleet.title}" for fleet in found[:_MAX_SHOWN])
    return f"{len(found)} fleets answer; give the address of the one to join, or a token of it (`fleetctl token create`):{titles}"
