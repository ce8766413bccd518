"""Magic packets on the wire, the power assertion as a process, and the sleep that the clocks show."""

import asyncio
import socket

import psutil

from machinery.macos_commands import MacCommand
from nodeagent.hardware import machine_sleep
from nodeagent.hardware.machine_sleep import MacSleeper, PowerAssertion
from schemas.power import WakePacket
from tests.support.clock import FakeClock

# In the place of caffeinate, which Linux does not have.
HOLDER = MacCommand(name="holder", program="/bin/sleep", arguments=("600",))


def test_a_packet_is_sent_three_times() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.0.0.1", 0))
        card.settimeout(30)
        packet = WakePacket(hardware_address="a4:83:e7:00:11:22", broadcast="127.0.0.1")
        machine_sleep.send_packets([packet], port=card.getsockname()[1])
        texts = {card.recv(2048) for _ in range(3)}
    assert texts == {b"\xff" * 6 + bytes.fromhex("a483e7001122") * 16}


async def test_an_assertion_is_one_process_that_ends_with_it() -> None:
    assertion = PowerAssertion(HOLDER)
    own = psutil.Process()
    before = set(own.children())
    await assertion.hold()
    await assertion.hold()
    (holder,) = set(own.children()) - before
    held = [assertion.is_held]
    holder.kill()
    holder.wait(30)
    await assertion.release()
    held.append(assertion.is_held)
    await assertion.hold()
    held.append(assertion.is_held)
    await assertion.release()
    assert held == [True, False, True]
    assert set(own.children()) == before
    missing = MacCommand(name="missing", program="/nowhere/caffeinate")
    await PowerAssertion(missing).hold()


async def test_a_sleep_shows_in_the_clocks() -> None:
    clock = FakeClock()
    async with asyncio.TaskGroup() as tasks:
        slept = tasks.create_task(MacSleeper(clock).suspend())
        await clock.advance(3)
        assert not slept.done()
        clock.doze(3600)
        await clock.advance(2)
        assert await slept
        refused = tasks.create_task(MacSleeper(clock).suspend())
        await clock.advance(70)
        assert not await refused
