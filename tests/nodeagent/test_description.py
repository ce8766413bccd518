"""The machine's part of the node's status: written when it changes, and resumed by the next run of the agent."""

import logging
from dataclasses import replace

import pytest

from nodeagent.description import MachineStatus
from nodeagent.hardware.readings import DiskReading, HeatReading, MemoryReading
from nodeagent.node.registration import NodeRegistration
from schemas.meta import find_condition
from schemas.node import MetalDevice, NodeLease, NodeStatus, WiredLimit
from store import codec, keys
from store.errors import ConflictError
from store.memory import MemoryTransport
from store.port import Delete, Put
from tests.support.clock import FakeClock
from tests.support.nodeagent_readings import GIB, STATUS, WELL, FakeMachineReader
from tests.support.values import present

HOT = replace(WELL, heat=HeatReading(throttled="slow"), power="Battery", owner_idle_s=1.0)


class Desk:
    """One node in an empty store; `run()` is a run of its agent."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryTransport(self.clock)
        self.machine = FakeMachineReader()
        self.run()

    def run(self, uid: str = "u") -> None:
        self.status = STATUS.model_copy(update={"uid": uid})
        self.presence = NodeRegistration(
            self.store, self.clock, node="mac-1", lease=NodeLease(uid=uid, session="s")
        )
        self.vitals = MachineStatus(self.machine, self.clock, every_s=5.0, limit_s=0.02)

    async def look(self) -> NodeStatus:
        """Take a reading ten seconds later, and write the status if it changed."""
        await self.clock.advance(10)
        if not self.vitals.is_resumed:
            self.vitals.resume(await self.presence.described())
        await self.vitals.update(has_engines=False)
        await self.presence.describe(self.vitals.fill(self.status))
        item = present(await self.store.get(keys.status_key("Node", "mac-1")))
        return codec.decode(NodeStatus, item)

    async def revision(self) -> int:
        return (await self.store.status()).revision


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_a_node_tells_how_its_machine_is(desk: Desk) -> None:
    said = await desk.look()
    assert (said.disk_bytes, said.disk_free_bytes) == (500 * GIB, 300 * GIB)
    assert (said.power, said.is_owner_active) == ("Mains", False)
    assert [(c.type, c.status.value) for c in said.conditions] == [
        ("DiskPressure", "False"),
        ("MemoryPressure", "False"),
        ("NeedsReboot", "False"),
        ("ThermalPressure", "False"),
    ]


async def test_nothing_is_written_without_a_change(desk: Desk) -> None:
    await desk.look()
    before = await desk.revision()
    for step in range(20):
        # What moves all the time: memory, disk and the owner's absence.
        desk.machine.now = replace(
            WELL,
            memory=MemoryReading(total_bytes=64 * GIB, available_bytes=(20 + step) * GIB),
            disk=DiskReading(total_bytes=500 * GIB, free_bytes=(301 + step % 5) * GIB),
            owner_idle_s=4000.0 + step,
        )
        await desk.look()
    assert await desk.revision() == before
    desk.machine.now = HOT
    said = await desk.look()
    assert await desk.revision() == before + 1
    assert (said.power, said.is_owner_active) == ("Battery", True)


@pytest.mark.parametrize(("chosen_gib", "limit_gib", "allocatable_gib"), [
    (None, 0, 51), (None, 56, 56), (None, 128, 64), (40, 0, 40), (40, 56, 40), (40, 32, 32),
])  # fmt: skip
async def test_memory_for_models_follows_the_effective_wired_limit(
    desk: Desk, chosen_gib: int | None, limit_gib: int, allocatable_gib: int
) -> None:
    """A limit that a person sets counts without a new agent; a smaller `--memory` stays."""
    if chosen_gib is not None:
        desk.status = STATUS.model_copy(update={"allocatable_bytes": chosen_gib * GIB})
    desk.vitals = MachineStatus(
        desk.machine, desk.clock, every_s=5.0, is_memory_chosen=chosen_gib is not None
    )
    limit = WiredLimit(mebibytes=limit_gib * 1024, set_by="Other")
    desk.machine.now = replace(WELL, wired_limit=limit)
    said = await desk.look()
    assert (said.allocatable_bytes // GIB, said.wired_limit) == (allocatable_gib, limit)
    desk.machine.now = WELL  # the next reading fails
    assert (await desk.look()).wired_limit == limit


@pytest.mark.parametrize(("first_gib", "chosen_gib", "expected"), [
    (0, None, [(53, "Metal"), (60, "WiredLimit"), (53, "Metal")]),
    (60, None, [(60, "WiredLimit"), (60, "WiredLimit"), (51, "Estimate")]),
    (0, 40, [(40, "Chosen"), (40, "Chosen"), (40, "Chosen")]),
])  # fmt: skip
async def test_metal_decides_unless_somebody_else_did(
    desk: Desk, first_gib: int, chosen_gib: int | None, expected: list[tuple[int, str]]
) -> None:
    """With a wired limit Metal recommends that limit, which is not its default."""
    recommended = (first_gib or 53) * GIB
    changes = {"metal_device": MetalDevice(recommended_bytes=recommended)}
    chosen = {} if chosen_gib is None else {"allocatable_bytes": chosen_gib * GIB}
    desk.status = STATUS.model_copy(update=changes | chosen)
    desk.vitals = MachineStatus(
        desk.machine, desk.clock, every_s=5.0, is_memory_chosen=chosen_gib is not None
    )
    reports = []
    for limit_gib in (first_gib, 60, 0):
        limit = WiredLimit(mebibytes=limit_gib * 1024, set_by="Other")
        desk.machine.now = replace(WELL, wired_limit=limit)
        status = await desk.look()
        reports.append((status.allocatable_bytes // GIB, str(status.allocatable_source)))
    assert reports == expected


async def test_the_next_run_of_the_agent_goes_on(desk: Desk) -> None:
    await desk.look()
    desk.machine.now = HOT
    said = await desk.look()
    before = await desk.revision()
    desk.run()
    assert await desk.look() == said
    assert await desk.revision() == before
    heat = present(find_condition(said.conditions, "ThermalPressure"))
    assert heat.last_transition_time is not None


@pytest.mark.parametrize("there", [None, b"words", b'{"storedVersion":99,"future":1}'])
async def test_a_status_of_another_node_is_not_resumed(desk: Desk, there: bytes | None) -> None:
    desk.machine.now = HOT
    await desk.look()
    if there is not None:
        key = keys.status_key("Node", "mac-1")
        await desk.store.commit([], [Put(key=key, value=there)])
    desk.run(uid="another machine")
    assert await desk.presence.described() is None


async def after_ten_looks(desk: Desk) -> set[str]:
    """Return how true the conditions are then."""
    said = [await desk.look() for _ in range(10)][-1]
    return {c.status.value for c in said.conditions}


async def test_a_reading_that_fails_or_hangs_costs_nothing_but_the_reading(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    await desk.look()
    desk.machine.error = OSError("gone")
    assert await after_ten_looks(desk) == {"Unknown"}
    desk.machine.error = None
    await desk.look()
    desk.machine.hangs = True
    assert await after_ten_looks(desk) == {"Unknown"}
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert vars(warnings[0])["parts"] == (
        "MemoryPressure, DiskPressure, ThermalPressure, NeedsReboot"
    )


async def test_readings_are_not_taken_in_bursts(desk: Desk) -> None:
    await desk.look()
    desk.machine.now = HOT
    await desk.clock.advance(1)
    await desk.vitals.update(has_engines=False)
    assert desk.vitals.fill(STATUS).power == "Mains"


async def test_a_node_is_not_described_during_a_restore(desk: Desk) -> None:
    await desk.look()
    await desk.store.commit([], [Put(key=keys.RESTORING, value=b"{}")])
    desk.machine.now = HOT
    with pytest.raises(ConflictError):
        await desk.look()
    await desk.store.commit([], [Delete(key=keys.RESTORING)])
    assert (await desk.look()).power == "Battery"
