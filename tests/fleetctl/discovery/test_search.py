"""The search for a fleet: suggestions choose addresses, and TLS decides."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.discovery.local_network import read_records
from fleetctl.discovery.search import MAX_TRIED, FleetSearch
from fleetctl.discovery.seeds import StaticSeeds
from fleetctl.discovery.suggestions import Findings, SourceName, Suggestion, collect
from fleetctl.fleets.join_client import JoinAddress
from machinery.clock import SystemClock
from machinery.mdns import ServiceRecord
from schemas.wire.discovery import Announcement, render
from tests.support.join import JoinStand
from tests.support.ports import free_port
from tests.support.tcp_server import tcp_server


@dataclass(frozen=True)
class Given:
    """A source with given suggestions."""

    suggestions: tuple[Suggestion, ...]
    name: SourceName = "mdns"

    async def suggest(self) -> Findings:
        return Findings(
            suggestions=self.suggestions, problems=("mdns: one network drops multicast",)
        )


def heard(address: JoinAddress, *authorities: bytes, role: str = "control") -> Suggestion:
    return Suggestion(
        source="mdns",
        role=role,  # type: ignore[arg-type]  # one of three
        name="mac-1",
        address=address,
        authorities=tuple(authority.hex() for authority in authorities),
    )


def search(authority: bytes | None, *sources: Given | StaticSeeds) -> FleetSearch:
    return FleetSearch(sources, SystemClock(), authority)


async def stands(folder: Path, count: int) -> list[JoinStand]:
    return [await JoinStand(folder / f"fleet-{number}").open() for number in range(count)]


def hash_of(stand: JoinStand) -> bytes:
    return stand.ca.authority.spki_hash


async def test_the_token_decides_between_fleets(tmp_path: Path) -> None:
    ours, other = await stands(tmp_path, 2)
    async with ours.serve() as here, other.serve() as there:
        source = Given((heard(there, hash_of(other)), heard(here, hash_of(ours))))
        fleet = await search(hash_of(ours), source).find(limit_s=30)
    assert fleet.addresses == (here,)


async def test_a_forged_announcement_leads_to_no_join(tmp_path: Path) -> None:
    """It claims our authority, but its server has a certificate of another one."""
    ours, forger = await stands(tmp_path, 2)
    async with forger.serve() as there:
        source = Given((heard(there, hash_of(ours)),))
        with pytest.raises(FleetctlError, match="the fleet of this token was not found") as error:
            await search(hash_of(ours), source).find(limit_s=1)
        assert "is not a server of the fleet that made this token" in error.value.message
        assert "one network drops multicast" in error.value.message
        async with ours.serve() as here:
            both = Given((heard(there, hash_of(ours)), heard(here, hash_of(ours))))
            fleet = await search(hash_of(ours), both).find(limit_s=30)
    assert fleet.addresses == (here,)


async def test_a_seed_is_enough_and_a_dead_hint_is_passed_over(tmp_path: Path) -> None:
    [ours] = await stands(tmp_path, 1)
    dead = JoinAddress("127.0.0.1", free_port())
    async with ours.serve() as here:
        seeds = StaticSeeds((dead, here))
        for expected in (hash_of(ours), None):
            fleet = await search(expected, seeds).find(limit_s=30)
            assert fleet.addresses == (here,)
            assert fleet.authority_hash == hash_of(ours)


async def test_an_address_of_a_source_without_hashes_is_asked(tmp_path: Path) -> None:
    [ours] = await stands(tmp_path, 1)
    async with ours.serve() as here:
        fleet = await search(hash_of(ours), Given((heard(here),), "tailscale")).find(limit_s=30)
    assert fleet.addresses == (here,)


async def test_several_fleets_without_a_token_are_listed(tmp_path: Path) -> None:
    ours, other = await stands(tmp_path, 2)
    async with ours.serve() as here, other.serve() as there:
        source = Given((heard(here, hash_of(ours)), heard(there, hash_of(other))))
        with pytest.raises(FleetctlError, match="2 fleets answer") as error:
            await search(None, source).find(limit_s=30)
    for stand, address in ((ours, here), (other, there)):
        assert f"{hash_of(stand).hex()[:12]} at 127.0.0.1:{address.port}" in error.value.message


async def test_a_flood_of_announcements_is_tried_in_part_only() -> None:
    tried = 0

    async def answer(_reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        nonlocal tried
        tried += 1

    async with tcp_server(answer) as port:
        flood = Given(tuple(heard(JoinAddress(f"127.0.0.{n}", port)) for n in range(1, 250)))
        with pytest.raises(FleetctlError, match="no fleet was found"):
            await search(None, flood).find(limit_s=1)
    assert tried <= 2 * MAX_TRIED


async def test_gateways_and_new_machines_are_no_join_ports(tmp_path: Path) -> None:
    [ours] = await stands(tmp_path, 1)
    async with ours.serve() as here:
        source = Given((heard(here, role="new"), heard(here, role="gateway")))
        with pytest.raises(FleetctlError, match="no fleet was found"):
            await search(None, source).find(limit_s=0.5)


async def test_each_address_is_suggested_once_and_the_first_source_counts() -> None:
    address = JoinAddress("10.0.0.5", 4002)
    sources: Sequence[StaticSeeds | Given] = (StaticSeeds((address,)), Given((heard(address),)))
    findings = await collect(sources)
    assert [suggestion.source for suggestion in findings.suggestions] == ["seeds"]


def test_records_that_are_malformed_are_no_suggestions() -> None:
    good = render(Announcement(role="new", name="mac-9"))

    def record(port: int = 9, **properties: str) -> ServiceRecord:
        return ServiceRecord(
            name="mac-9-new",
            port=port,
            properties={**good, **properties},
            addresses=("10.0.0.9",),
            interface="en0",
            age_s=1.0,
        )

    records = [record(), record(role="root"), record(port=0), record(port=70_000), record(v="0")]
    [suggestion] = read_records(records)
    assert (suggestion.name, suggestion.address.host, suggestion.age_s) == (
        "mac-9",
        "10.0.0.9",
        1.0,
    )
