"""The announcement of a process on the local network."""

import asyncio
import sys

import pytest

from identity.announcement import Listener, machine_name
from schemas.wire.discovery import Announcement, parse, render


def listener(host: str) -> Listener:
    return Listener(role="gateway", host=host, port=4000)


@pytest.mark.parametrize(("host", "is_reachable"), [
    ("127.0.0.1", False), ("::1", False), ("localhost", False), ("10.0.0.5", True),
    ("fd00::5", True), ("0.0.0.0", True), ("::", True), ("", True),
])  # fmt: skip
def test_only_what_other_machines_reach_is_announced(host: str, is_reachable: bool) -> None:
    assert listener(host).is_reachable is is_reachable


def test_an_unspecified_address_stands_for_all_of_the_machine() -> None:
    assert listener("0.0.0.0").addresses == listener("::").addresses == listener("").addresses == ()
    assert listener("10.0.0.5").addresses == ("10.0.0.5",)


@pytest.mark.parametrize("text", ["Tim's Mac Studio.local", "mac-1", "", "-.", "Ä" * 99, "a" * 300])
def test_every_host_name_becomes_a_name_that_is_read(text: str) -> None:
    assert parse(render(Announcement(role="new", name=machine_name(text)))) is not None


@pytest.mark.ci
async def test_nothing_imports_zeroconf_before_it_announces_or_listens() -> None:
    modules = (
        "gateway.__main__, reconciler.__main__, fleetctl.verbs.join, fleetctl.verbs.join_requests, "
        "fleetctl.verbs.discover"
    )
    code = f"import sys, {modules}\nprint([m for m in sys.modules if m.startswith('zeroconf')])"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.decode().strip() == "[]"
