"""Conditions of a machine: the readings at which each begins and ends, and their messages."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.hardware import macos
from nodeagent.hardware.macos import ReadingOutput
from nodeagent.hardware.readings import (
    DiskReading,
    HeatReading,
    MachineReading,
    MemoryPressure,
    MemoryReading,
    RebootReading,
)
from nodeagent.node import machine_conditions
from nodeagent.node.machine_conditions import (
    CONDITION_TYPES,
    DISK_PRESSURE,
    MEMORY_PRESSURE,
    NEEDS_REBOOT,
    THERMAL_PRESSURE,
    LeakedResources,
    MachineHistory,
    RebootReason,
    next_history,
)
from schemas.meta import Condition, ConditionStatus, find_condition
from schemas.node import FabricInterface, NodeFabric, RdmaDevice, ThunderboltPort
from tests.support.nodeagent_groups import NOW
from tests.support.nodeagent_readings import WELL

GIB = 2**30


@pytest.mark.parametrize(
    ("shown_gib", "free_gib", "expected_gib"),
    [
        (None, 0.9, 0),
        (None, 19.9, 19),
        (None, 20, 20),
        (None, 109, 100),
        (5, 5.9, 5),
        (5, 6.2, 5),
        (5, 6.3, 6),
        (5, 4.8, 5),
        (5, 4.7, 4),
        (100, 112, 100),
        (100, 113, 110),
        (100, 98, 100),
        (100, 97, 90),
        (20, 19.8, 20),
        (20, 19.7, 19),
        (19, 20.2, 19),
        (19, 20.3, 20),
    ],
)
def test_free_space_in_steps(shown_gib: int | None, free_gib: float, expected_gib: int) -> None:
    shown = None if shown_gib is None else shown_gib * GIB
    assert (
        machine_conditions.quantize_free_bytes(int(free_gib * GIB), shown=shown)
        == expected_gib * GIB
    )


sizes = st.integers(0, 300 * GIB)


@given(sizes, sizes)
def test_what_is_shown_is_near_and_stays(size: int, before: int) -> None:
    shown = machine_conditions.quantize_free_bytes(
        size, shown=machine_conditions.quantize_free_bytes(before, shown=None)
    )
    assert abs(size - shown) <= 10 * GIB * 5 // 4
    assert machine_conditions.quantize_free_bytes(size, shown=shown) == shown


def cables(state: str, *, peer: str = "other") -> NodeFabric:
    return NodeFabric(
        ports=(ThunderboltPort(receptacle="1", interface="en5", peer=peer),),
        rdma=(RdmaDevice(name="rdma_en5", interface="en5").model_copy(update={"state": state}),),
    )


@pytest.mark.parametrize(
    ("fabric", "used", "at_s", "reason"),
    [
        (cables("Down"), "rdma_en5", 61, "RdmaDown"),
        (cables("Down"), "rdma_en5", 59, ""),
        (cables("Down"), "rdma_en6", 61, ""),
        (cables("Down", peer=""), "rdma_en5", 61, ""),
        (cables("Active"), "rdma_en5", 61, ""),
        (cables("Unknown"), "rdma_en5", 61, ""),
        (None, "rdma_en5", 61, ""),
    ],
)
def test_a_port_that_stays_down_though_its_cable_is_in(
    fabric: NodeFabric | None, used: str, at_s: float, reason: str
) -> None:
    leaked_resources = LeakedResources()
    leaked_resources.record_devices([used], 0)
    reboot_reason = leaked_resources.find(fabric, [], at_s)
    assert (reboot_reason.reason if reboot_reason is not None else "") == reason


def test_a_port_that_came_back_is_forgiven() -> None:
    leaked_resources = LeakedResources()
    leaked_resources.record_devices(["rdma_en5"], 0)
    assert leaked_resources.find(cables("Active"), [], 10) is None
    assert leaked_resources.find(cables("Down"), [], 100) is None


def test_an_engine_that_does_not_die() -> None:
    reason = LeakedResources().find(None, ["qwen-0"], 0)
    assert reason is not None
    assert reason.reason == "ProcessUndying"
    assert "qwen-0" in reason.message


def test_what_is_broken_is_the_nodes_condition_until_it_is_mended() -> None:
    broken = RebootReason(reason="ProcessUndying", message="restart this machine")
    past = machine_conditions.next_history(
        WELL, MachineHistory(), NOW, has_engines=True, reboot_reason=broken
    )
    said = find_condition(past.conditions, "NeedsReboot")
    assert said is not None
    assert (said.status.value, said.reason, said.message) == (
        "True",
        "ProcessUndying",
        "restart this machine",
    )
    past = machine_conditions.next_history(WELL, past, NOW, has_engines=True)
    said = find_condition(past.conditions, "NeedsReboot")
    assert said is not None
    assert said.status.value == "False"


START = datetime(2026, 1, 1, tzinfo=UTC)
EVERY = timedelta(seconds=10)


def cable_at(*addresses: str) -> MachineReading:
    """Return a reading of a Mac whose cable at en5 has these addresses."""
    interfaces = tuple(FabricInterface(name="en5", address=address) for address in addresses)
    return replace(WELL, fabric=cables("Active").model_copy(update={"interfaces": interfaces}))


@pytest.mark.parametrize(
    ("minutes", "changes", "status"),
    [
        pytest.param(30, 4, "True", id="each-half-hour"),
        pytest.param(30, 3, "", id="three-times"),
        pytest.param(60, 8, "", id="each-hour"),
        pytest.param(1, 0, "", id="never"),
    ],
)
def test_addresses_of_cables_that_keep_changing(minutes: int, changes: int, status: str) -> None:
    past, now = MachineHistory(), NOW
    for number in range(changes + 1):
        # Readings between two changes, and those without cables, count for nothing.
        for reading in (cable_at(*["10.0.0.1"] * (number % 2)), WELL):
            past = machine_conditions.next_history(reading, past, now, has_engines=False)
        now += timedelta(minutes=minutes)
    said = find_condition(past.conditions, "CablesUnstable")
    assert ("" if said is None else said.status.value) == status
    if said is None:
        return
    later = now + timedelta(hours=2)
    past = machine_conditions.next_history(WELL, past, later, has_engines=False)
    past = machine_conditions.next_history(
        cable_at(), past, later + timedelta(minutes=1), has_engines=False
    )
    said = find_condition(past.conditions, "CablesUnstable")
    assert said is not None
    assert said.status.value == "False"


def memory(
    left_gib: float, *, level: MemoryPressure | None = None, stalled: float = 0.0
) -> MachineReading:
    memory_reading = MemoryReading(
        total_bytes=100 * GIB,
        available_bytes=int(left_gib * GIB),
        level=level,
        stalled_percent=stalled,
    )
    return MachineReading(memory=memory_reading)


def disk(free_gib: float, total_gib: float = 400) -> MachineReading:
    return MachineReading(
        disk=DiskReading(
            path="/models", total_bytes=int(total_gib * GIB), free_bytes=int(free_gib * GIB)
        )
    )


def warm(celsius: float) -> MachineReading:
    return MachineReading(
        heat=HeatReading(hottest="x86_pkg_temp", celsius=celsius, limit_celsius=95)
    )


def throttles(count: int) -> MachineReading:
    return MachineReading(heat=HeatReading(throttle_count=count))


def wired(gib: float) -> MachineReading:
    return MachineReading(reboot=RebootReading(total_bytes=64 * GIB, wired_bytes=int(gib * GIB)))


class Machine:
    """One machine, a reading every ten seconds."""

    def __init__(self) -> None:
        self.now = START
        self.past = MachineHistory()

    def say(self, reading: MachineReading, *, has_engines: bool = False) -> None:
        self.now += EVERY
        self.past = next_history(reading, self.past, self.now, has_engines=has_engines)

    def condition(self, type_: str) -> Condition:
        found = find_condition(self.past.conditions, type_)
        assert found is not None
        return found


def truths(type_: str, *readings: MachineReading, has_engines: bool = False) -> str:
    """Return the condition's truth after each reading: T, F or U."""
    machine, said = Machine(), ""
    for reading in readings:
        machine.say(reading, has_engines=has_engines)
        said += machine.condition(type_).status[0]
    return said


WARNING, CRITICAL, NORMAL = MemoryPressure.WARNING, MemoryPressure.CRITICAL, MemoryPressure.NORMAL


@pytest.mark.parametrize(
    ("type_", "readings", "expected"),
    [
        pytest.param(
            MEMORY_PRESSURE, [memory(x) for x in (50, 5, 4.9, 5, 9.9, 10, 9)], "FFTTTFF", id="left"
        ),
        pytest.param(
            MEMORY_PRESSURE,
            [memory(50, stalled=x) for x in (0, 19, 20, 11, 10, 9, 19)],
            "FFTTTFF",
            id="stalls",
        ),
        pytest.param(
            MEMORY_PRESSURE,
            [memory(1, level=x) for x in (NORMAL, WARNING, CRITICAL, WARNING, NORMAL, WARNING)],
            "FFTTFF",
            id="macos-decides-alone",
        ),
        pytest.param(
            DISK_PRESSURE, [disk(x) for x in (90, 20, 19.9, 20, 27.9, 28, 21)], "FFTTTFF", id="5%"
        ),
        pytest.param(
            DISK_PRESSURE,
            [disk(x, 60) for x in (5, 4.9, 5, 7.9, 8, 5)],
            "FTTTFF",
            id="5-gib-of-a-small-one",
        ),
        pytest.param(
            THERMAL_PRESSURE,
            [warm(94.9), warm(95), *[warm(94)] * 7, warm(90.1), warm(90), warm(94)],
            "FT" + "T" * 7 + "TFF",
            id="degrees",
        ),
        pytest.param(
            THERMAL_PRESSURE,
            [
                MachineReading(heat=HeatReading(throttled="slow")),
                *[MachineReading(heat=HeatReading())] * 6,
            ],
            "TTTTTTF",
            id="cools-for-a-minute",
        ),
        pytest.param(
            THERMAL_PRESSURE,
            [throttles(x) for x in (5, 9, 9, 12, 13, 13, 13, 13, 13, 13, 13)],
            "FFFFTTTTTTF",
            id="one-burst-is-no-heat",
        ),
        pytest.param(
            THERMAL_PRESSURE,
            [MachineReading(heat=HeatReading(has_sensor=False))],
            "U",
            id="no-sensor",
        ),
        pytest.param(
            NEEDS_REBOOT,
            [
                MachineReading(reboot=RebootReading(wanted_by="libc6")),
                MachineReading(reboot=RebootReading()),
            ],
            "TF",
            id="an-update",
        ),
        # Of 64 GiB, 7.2 are normal and 10.4 are too much.
        pytest.param(
            NEEDS_REBOOT,
            [*[wired(11)] * 7, wired(10), wired(7.3), wired(7), wired(10)],
            "FFFFFFTTTFF",
            id="stranded-after-a-minute",
        ),
        pytest.param(
            NEEDS_REBOOT,
            [*[wired(11)] * 6, wired(4), *[wired(11)] * 6],
            "F" * 13,
            id="an-end-takes-time",
        ),
    ],
)
def test_when_a_condition_begins_and_ends(
    type_: str, readings: list[MachineReading], expected: str
) -> None:
    assert truths(type_, *readings) == expected


VM_STAT = (Path(__file__).parents[1] / "hardware" / "captures" / "vm_stat.txt").read_text()


def with_wired(gib: float) -> MachineReading:
    """Return the reading of a Mac with 64 GiB and the captured output, of which so much is wired."""
    pages = int(gib * GIB) // 16384
    return macos.assemble_reading(
        ReadingOutput(
            vm_stat=VM_STAT.replace("251554", str(pages)), sysctl=f"hw.memsize: {64 * GIB}\n"
        )
    )


# Models may have 48 GiB of 64; 7.2 GiB wired are usual.
@pytest.mark.parametrize(
    ("readings", "configured_gib", "left_gib"),
    [
        pytest.param([with_wired(7)] * 9, 48, 48, id="usual"),
        pytest.param([with_wired(17)] * 6, 48, 48, id="an-engine-releases-its-memory"),
        pytest.param([with_wired(17)] * 9, 48, 38, id="others-hold-memory"),
        pytest.param([*[with_wired(17)] * 9, with_wired(7)], 48, 48, id="they-released-it"),
        pytest.param([*[with_wired(17)] * 9, with_wired(17.4)], 48, 38, id="a-little-more"),
        pytest.param([with_wired(17)] * 9, 24, 24, id="a-limit-that-leaves-enough"),
        pytest.param([with_wired(63)] * 9, 48, 0, id="nothing-is-left"),
    ],
)
def test_models_do_not_get_what_others_wired(
    readings: list[MachineReading], configured_gib: int, left_gib: int
) -> None:
    machine = Machine()
    for reading in readings:
        machine.say(reading)
    machine.say(with_wired(60), has_engines=True)  # the engine's own memory changes nothing
    left = machine_conditions.allocatable_bytes(configured_gib * GIB, 48 * GIB, machine.past)
    assert left == left_gib * GIB


def test_what_engines_wire_is_not_stranded() -> None:
    assert truths(NEEDS_REBOOT, *[wired(60)] * 9, has_engines=True) == "F" * 9


def test_stranded_memory_is_not_forgotten_while_an_engine_runs() -> None:
    machine = Machine()
    for _ in range(7):
        machine.say(wired(11))
    machine.say(wired(40), has_engines=True)
    assert machine.condition(NEEDS_REBOOT).status is ConditionStatus.TRUE
    machine.say(wired(3), has_engines=True)
    assert machine.condition(NEEDS_REBOOT).status is ConditionStatus.FALSE


@pytest.mark.parametrize(
    ("type_", "reading", "reason", "message"),
    [
        (
            MEMORY_PRESSURE,
            memory(3.2),
            "MemoryShort",
            "3.2 GiB of 100.0 GiB were free when this began. Close programs that "
            "are not needed on this machine, or move its replicas away (fleetctl drain)",
        ),
        (
            MEMORY_PRESSURE,
            memory(3.2, level=CRITICAL),
            "MemoryShort",
            "macOS reports critical memory pressure; 3.2 GiB of 100.0 GiB were free when this began. Close programs that "
            "are not needed on this machine, or move its replicas away (fleetctl drain)",
        ),
        (
            MEMORY_PRESSURE,
            memory(12, stalled=31.4),
            "MemoryShort",
            "programs waited for memory for 31 % of a minute; 12.0 GiB of 100.0 GiB were free when this began. Close programs that "
            "are not needed on this machine, or move its replicas away (fleetctl drain)",
        ),
        (
            DISK_PRESSURE,
            disk(3.7),
            "DiskAlmostFull",
            "3.0 GiB of 400.0 GiB are free on the disk of the models, /models. "
            "Remove unused models or files until more than 7 % and 8 GiB are free",
        ),
        (
            DISK_PRESSURE,
            disk(0.2),
            "DiskAlmostFull",
            "less than 1 GiB of 400.0 GiB are free on the disk of the models, /models. "
            "Remove unused models or files until more than 7 % and 8 GiB are free",
        ),
        (
            THERMAL_PRESSURE,
            warm(97.4),
            "TooWarm",
            "x86_pkg_temp was at 97 °C; the machine slows down at 95 °C. Cool this machine, or reduce its load",
        ),
        (
            THERMAL_PRESSURE,
            MachineReading(heat=HeatReading(throttled="macOS reports the thermal level heavy")),
            "TooWarm",
            "macOS reports the thermal level heavy. Cool this machine, or reduce its load",
        ),
        (
            THERMAL_PRESSURE,
            MachineReading(heat=HeatReading(has_sensor=False)),
            "NoSensor",
            "this machine has no sensor that the agent can read, so heat is not detected",
        ),
        (
            NEEDS_REBOOT,
            MachineReading(reboot=RebootReading(wanted_by="libc6, linux-base")),
            "UpdateWaiting",
            "an update waits for a restart (libc6, linux-base): `fleetctl node reboot NAME --drain`",
        ),
        (
            NEEDS_REBOOT,
            wired(44.5),
            "MemoryStranded",
            "44.5 GiB of 64.0 GiB stay wired although no engine of the fleet runs: a killed engine "
            "stranded them, or another program (Ollama, LM Studio) holds them. Quit that program, or run `fleetctl node reboot NAME --drain`",
        ),
        (
            MEMORY_PRESSURE,
            MachineReading(),
            "NotReadable",
            "this part of the machine cannot be read; the agent's log names the failed parts",
        ),
    ],
)
def test_what_a_person_reads(
    type_: str, reading: MachineReading, reason: str, message: str
) -> None:
    machine = Machine()
    for _ in range(7):
        machine.say(reading)
    said = machine.condition(type_)
    assert (said.reason, said.message) == (reason, message)


def test_slow_throttling_is_reported() -> None:
    machine = Machine()
    for count in (1, 2, 3):
        machine.say(throttles(count))
    said = machine.condition(THERMAL_PRESSURE)
    assert said.message.startswith("the processor is throttled repeatedly. Cool")


def test_the_time_moves_with_the_truth_alone() -> None:
    machine = Machine()
    machine.say(memory(50))
    machine.say(memory(3))
    began, first = machine.now, machine.condition(MEMORY_PRESSURE)
    machine.say(memory(2))
    assert machine.condition(MEMORY_PRESSURE) == first
    assert first.last_transition_time == began
    machine.say(memory(50))
    assert machine.condition(MEMORY_PRESSURE).last_transition_time == machine.now


def test_what_cannot_be_read_is_believed_for_a_minute_more() -> None:
    assert truths(MEMORY_PRESSURE, memory(3), *[MachineReading()] * 7, memory(50)) == "TTTTTTTUF"
    assert (
        truths(
            MEMORY_PRESSURE, memory(3), *[MachineReading()] * 6, memory(3), *[MachineReading()] * 6
        )
        == "T" * 14
    )
    assert truths(MEMORY_PRESSURE, MachineReading()) == "U"


def test_power_and_owner() -> None:
    machine = Machine()
    assert (machine.past.power, machine.past.is_owner_active) == ("Unknown", False)
    machine.say(MachineReading(power="Battery", owner_idle_s=299.9))
    assert (machine.past.power, machine.past.is_owner_active) == ("Battery", True)
    for _ in range(6):
        machine.say(MachineReading())
    assert (machine.past.power, machine.past.is_owner_active) == ("Battery", True)
    machine.say(MachineReading())
    assert (machine.past.power, machine.past.is_owner_active) == ("Unknown", False)
    machine.say(MachineReading(power="Mains", owner_idle_s=300))
    assert (machine.past.power, machine.past.is_owner_active) == ("Mains", False)


heats = st.builds(
    HeatReading,
    has_sensor=st.booleans(),
    throttled=st.sampled_from(["", "slow"]),
    throttle_count=st.integers(0, 3),
    celsius=st.floats(0, 120),
    limit_celsius=st.sampled_from([0.0, 95.0]),
)
readings = st.builds(
    MachineReading,
    memory=st.none()
    | st.builds(
        MemoryReading,
        total_bytes=st.just(100 * GIB),
        available_bytes=st.integers(0, 100 * GIB),
        level=st.none() | st.sampled_from(MemoryPressure),
        stalled_percent=st.floats(0, 100),
    ),
    disk=st.none()
    | st.builds(DiskReading, total_bytes=st.just(300 * GIB), free_bytes=st.integers(0, 300 * GIB)),
    heat=st.none() | heats,
    reboot=st.none()
    | st.builds(
        RebootReading,
        wanted_by=st.sampled_from(["", "libc6"]),
        total_bytes=st.just(64 * GIB),
        wired_bytes=st.integers(0, 64 * GIB),
    ),
    power=st.sampled_from(["Mains", "Battery", "Unknown"]),
    owner_idle_s=st.none() | st.floats(0, 1000),
)


def told(past: MachineHistory) -> tuple[object, ...]:
    """Return what of the past is written into the node's status."""
    return (
        past.conditions,
        past.disk_bytes,
        past.disk_free_bytes,
        past.power,
        past.is_owner_active,
    )


@given(st.lists(st.tuples(readings, st.booleans()), max_size=12), readings, st.booleans())
def test_a_machine_that_stays_as_it_is_becomes_quiet(
    history: list[tuple[MachineReading, bool]], last: MachineReading, has_engines: bool
) -> None:
    machine = Machine()
    for reading, engines in history:
        machine.say(reading, has_engines=engines)
    for _ in range(9):
        machine.say(last, has_engines=has_engines)
    before = told(machine.past)
    for _ in range(9):
        machine.say(last, has_engines=has_engines)
        assert told(machine.past) == before


@given(st.lists(st.tuples(readings, st.booleans()), min_size=1, max_size=12))
def test_all_conditions_are_there_and_the_times_are_theirs(
    history: list[tuple[MachineReading, bool]],
) -> None:
    machine = Machine()
    before: dict[str, Condition] = {}
    for reading, engines in history:
        machine.say(reading, has_engines=engines)
        now = {c.type: c for c in machine.past.conditions}
        assert list(now) == sorted(CONDITION_TYPES)
        for type_, said in now.items():
            moved = type_ not in before or before[type_].status != said.status
            old = machine.now if moved else before[type_].last_transition_time
            assert said.last_transition_time == old
        before = now


def test_figures_that_change_continuously_are_not_reported() -> None:
    machine = Machine()
    machine.say(memory(3))
    before = told(machine.past)
    for left in (3.1, 2.9, 4.5):
        machine.say(memory(left))
    assert told(machine.past) == before
    busy = replace(disk(100.2), memory=memory(2).memory)
    machine.say(busy)
    before = told(machine.past)
    machine.say(replace(disk(99.8), memory=memory(2.5).memory))
    assert told(machine.past) == before
