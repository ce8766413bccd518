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
from nodeagent.node.leaked_resources import LeakedResources, RebootReason
from nodeagent.node.machine_conditions import (
    CONDITION_TYPES,
    DISK_PRESSURE,
    KERNEL_PANICS,
    MEMORY_PRESSURE,
    NEEDS_REBOOT,
    THERMAL_PRESSURE,
    MachineHistory,
    next_history,
)
from schemas.meta import Condition, find_condition
from schemas.node import FabricInterface, KernelPanic, NodeFabric, RdmaDevice, ThunderboltPort
from tests.support.nodeagent_groups import NOW
from tests.support.nodeagent_readings import WELL
from tests.support.values import present

GIB = 2**30
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("shown_gib", "free_gib", "expected_gib"), [
    (None, 0.9, 0), (None, 19.9, 19), (None, 20, 20), (None, 109, 100), (5, 5.9, 5), (5, 6.2, 5),
    (5, 6.3, 6), (5, 4.8, 5), (5, 4.7, 4), (100, 112, 100), (100, 113, 110), (100, 98, 100),
    (100, 97, 90), (20, 19.8, 20), (20, 19.7, 19), (19, 20.2, 19), (19, 20.3, 20),
])  # fmt: skip
def test_free_space_in_steps(shown_gib: int | None, free_gib: float, expected_gib: int) -> None:
    shown = None if shown_gib is None else shown_gib * GIB
    quantized = machine_conditions.quantize_free_bytes(int(free_gib * GIB), shown=shown)
    assert quantized == expected_gib * GIB


sizes = st.integers(0, 300 * GIB)


@given(sizes, sizes)
def test_what_is_shown_is_near_and_stays(size: int, before: int) -> None:
    quantize = machine_conditions.quantize_free_bytes
    shown = quantize(size, shown=quantize(before, shown=None))
    assert abs(size - shown) <= 10 * GIB * 5 // 4
    assert quantize(size, shown=shown) == shown


def cables(state: str, *, peer: str = "other") -> NodeFabric:
    return NodeFabric(
        ports=(ThunderboltPort(receptacle="1", interface="en5", peer=peer),),
        rdma=(RdmaDevice(name="rdma_en5", interface="en5").model_copy(update={"state": state}),),
    )


@pytest.mark.parametrize(("fabric", "used", "at_s", "reason"), [
    (cables("Down"), "rdma_en5", 61, "RdmaDown"),
    (cables("Down"), "rdma_en5", 59, ""),
    (cables("Down"), "rdma_en6", 61, ""),
    (cables("Down", peer=""), "rdma_en5", 61, ""),
    (cables("Active"), "rdma_en5", 61, ""),
    (cables("Unknown"), "rdma_en5", 61, ""),
    (None, "rdma_en5", 61, ""),
])  # fmt: skip
def test_a_port_that_stays_down_though_its_cable_is_in(
    fabric: NodeFabric | None, used: str, at_s: float, reason: str
) -> None:
    leaked = LeakedResources()
    leaked.record_devices([used], 0)
    reboot_reason = leaked.find(fabric, [], at_s)
    assert (reboot_reason.reason if reboot_reason is not None else "") == reason


def test_a_port_that_came_back_is_forgiven() -> None:
    leaked = LeakedResources()
    leaked.record_devices(["rdma_en5"], 0)
    assert leaked.find(cables("Active"), [], 10) is None
    assert leaked.find(cables("Down"), [], 100) is None


BUSY = "its rank ended with 1: [jaccl] Creating the queue pair failed with errno 16. Thunderbolt RDMA devices"
INVALID = "its rank ended with 1: [jaccl] Changing queue pair to RTR failed with errno 22"
LINKED = cables("Active").model_copy(
    update={"interfaces": (FabricInterface(name="en5", address="10.0.1.1"),)}
)


@pytest.mark.parametrize(("fabric", "ends", "is_exhausted"), [
    (None, [(1, BUSY), (2, BUSY)], True),
    (None, [(1, BUSY), (1, BUSY)], False),  # written twice
    (None, [(1, BUSY)], False),
    (None, [(1, BUSY), (2, "its rank ended with 1"), (3, BUSY)], False),
    (None, [(1, BUSY), (2, INVALID)], False),
    (None, [(1, "Couldn't allocate protection domain"), (2, "ibv_alloc_pd failed")], True),
    (LINKED, [(1, INVALID), (2, INVALID), (3, INVALID)], True),
    (cables("Active"), [(1, INVALID), (2, INVALID)], False),  # no address: another cure
    (LINKED, [(1, "connect: errno 65"), (2, "connect: errno 65")], False),  # privacy: another cure
])  # fmt: skip
def test_rdma_that_fails_in_two_epochs_in_a_row_needs_a_reboot(
    fabric: NodeFabric | None, ends: list[tuple[int, str]], is_exhausted: bool
) -> None:
    leaked = LeakedResources()
    for epoch, words in ends:
        leaked.record_end("qwen-0", epoch, words)
    reason = leaked.find(fabric, [], 0)
    assert (reason is not None and reason.reason == "RdmaExhausted") == is_exhausted
    leaked.record_ready("qwen-0")
    assert leaked.find(fabric, [], 0) is None


def test_an_engine_that_does_not_die_needs_a_reboot_until_it_is_gone() -> None:
    undying = present(LeakedResources().find(None, ["qwen-0"], 0))
    assert undying.reason == "ProcessUndying"
    assert "qwen-0" in undying.message
    machine = Machine()
    machine.say(WELL, has_engines=True, reboot_reason=undying)
    condition = machine.condition(NEEDS_REBOOT)
    assert (condition.status, condition.reason) == ("True", "ProcessUndying")
    assert condition.message == undying.message
    machine.say(WELL, has_engines=True)
    assert machine.condition(NEEDS_REBOOT).status == "False"


def cable_at(*addresses: str) -> MachineReading:
    """Return a reading of a Mac whose cable at en5 has these addresses."""
    interfaces = tuple(FabricInterface(name="en5", address=address) for address in addresses)
    return replace(WELL, fabric=cables("Active").model_copy(update={"interfaces": interfaces}))


@pytest.mark.parametrize(("minutes", "changes", "status"), [
    pytest.param(30, 4, "True", id="each-half-hour"),
    pytest.param(30, 3, "", id="three-times"),
    pytest.param(60, 8, "", id="each-hour"),
    pytest.param(1, 0, "", id="never"),
])  # fmt: skip
def test_addresses_of_cables_that_keep_changing(minutes: int, changes: int, status: str) -> None:
    history, now = MachineHistory(), NOW
    for number in range(changes + 1):
        # Readings between two changes, and those without cables, count for nothing.
        for reading in (cable_at(*["10.0.0.1"] * (number % 2)), WELL):
            history = next_history(reading, history, now, has_engines=False)
        now += timedelta(minutes=minutes)
    condition = find_condition(history.conditions, "CablesUnstable")
    assert ("" if condition is None else condition.status) == status
    if condition is None:
        return
    for reading, later in ((WELL, timedelta(hours=2)), (cable_at(), timedelta(hours=2, minutes=1))):
        history = next_history(reading, history, now + later, has_engines=False)
    assert present(find_condition(history.conditions, "CablesUnstable")).status == "False"


def memory(
    available_gib: float, *, level: MemoryPressure | None = None, stalled: float = 0.0
) -> MachineReading:
    available_bytes = int(available_gib * GIB)
    return MachineReading(
        memory=MemoryReading(
            total_bytes=100 * GIB,
            available_bytes=available_bytes,
            level=level,
            stalled_percent=stalled,
        )
    )


def disk(free_gib: float, total_gib: float = 400, path: str = "/models") -> MachineReading:
    total_bytes, free_bytes = int(total_gib * GIB), int(free_gib * GIB)
    reading = DiskReading(path=path, total_bytes=total_bytes, free_bytes=free_bytes)
    if path == "/models":
        return MachineReading(disk=reading)
    return replace(disk(300), state_disk=reading)


def warm(celsius: float) -> MachineReading:
    heat = HeatReading(hottest="x86_pkg_temp", celsius=celsius, limit_celsius=95)
    return MachineReading(heat=heat)


def throttles(count: int) -> MachineReading:
    return MachineReading(heat=HeatReading(throttle_count=count))


def wired(gib: float) -> MachineReading:
    return MachineReading(reboot=RebootReading(total_bytes=64 * GIB, wired_bytes=int(gib * GIB)))


class Machine:
    """One machine, a reading every ten seconds."""

    def __init__(self) -> None:
        self.now = START
        self.history = MachineHistory()

    def say(
        self,
        *readings: MachineReading,
        has_engines: bool = False,
        reboot_reason: RebootReason | None = None,
    ) -> None:
        for reading in readings:
            self.now += timedelta(seconds=10)
            self.history = next_history(
                reading,
                self.history,
                self.now,
                has_engines=has_engines,
                reboot_reason=reboot_reason,
            )

    def condition(self, type_: str) -> Condition:
        return present(find_condition(self.history.conditions, type_))


def truths(type_: str, *readings: MachineReading, has_engines: bool = False) -> str:
    """Return the condition's truth after each reading: T, F or U."""
    machine, letters = Machine(), ""
    for reading in readings:
        machine.say(reading, has_engines=has_engines)
        letters += machine.condition(type_).status[0]
    return letters


WARNING, CRITICAL, NORMAL = MemoryPressure.WARNING, MemoryPressure.CRITICAL, MemoryPressure.NORMAL
NOTHING = MachineReading()
SLOW, COOL = (MachineReading(heat=HeatReading(throttled=text)) for text in ("slow", ""))
BLIND = MachineReading(heat=HeatReading(has_sensor=False))
UPDATE = MachineReading(reboot=RebootReading(wanted_by="libc6, linux-base"))


@pytest.mark.parametrize(("type_", "readings", "expected"), [
    pytest.param(MEMORY_PRESSURE, [memory(x) for x in (50, 5, 4.9, 5, 9.9, 10, 9)], "FFTTTFF", id="available"),
    pytest.param(MEMORY_PRESSURE, [memory(50, stalled=x) for x in (0, 19, 20, 11, 10, 9, 19)], "FFTTTFF", id="stalls"),
    pytest.param(MEMORY_PRESSURE, [memory(1, level=x) for x in (NORMAL, WARNING, CRITICAL, WARNING, NORMAL, WARNING)], "FFTTFF", id="macos-decides-alone"),
    pytest.param(MEMORY_PRESSURE, [memory(3), *[NOTHING] * 7, memory(50)], "TTTTTTTUF", id="a-minute-without-readings"),
    pytest.param(MEMORY_PRESSURE, [memory(3), *[NOTHING] * 6, memory(3), *[NOTHING] * 6], "T" * 14, id="less-than-a-minute-without"),
    pytest.param(MEMORY_PRESSURE, [NOTHING], "U", id="never-read"),
    pytest.param(DISK_PRESSURE, [disk(x) for x in (90, 20, 19.9, 20, 27.9, 28, 21)], "FFTTTFF", id="5%"),
    pytest.param(DISK_PRESSURE, [disk(x, 60) for x in (5, 4.9, 5, 7.9, 8, 5)], "FTTTFF", id="5-gib-of-a-small-one"),
    pytest.param(DISK_PRESSURE, [disk(x, path="/state") for x in (3, 1, 0.9, 1.9, 2, 1.5)], "FFTTFF", id="large-state-disk"),
    pytest.param(DISK_PRESSURE, [disk(x, 1, "/state") for x in (0.2, 0.09, 0.19, 0.21)], "FTTF", id="small-state-disk"),
    pytest.param(THERMAL_PRESSURE, [warm(94.9), warm(95), *[warm(94)] * 7, warm(90.1), warm(90), warm(94)], "FT" + "T" * 7 + "TFF", id="degrees"),
    pytest.param(THERMAL_PRESSURE, [SLOW, *[COOL] * 6], "TTTTTTF", id="cools-for-a-minute"),
    pytest.param(THERMAL_PRESSURE, [throttles(x) for x in (5, 9, 9, 12, 13, 13, 13, 13, 13, 13, 13)], "FFFFTTTTTTF", id="one-burst-is-no-heat"),
    pytest.param(THERMAL_PRESSURE, [BLIND], "U", id="no-sensor"),
    pytest.param(NEEDS_REBOOT, [UPDATE, MachineReading(reboot=RebootReading())], "TF", id="an-update"),
    # Of 64 GiB, 7.2 are normal and 10.4 are too much.
    pytest.param(NEEDS_REBOOT, [*[wired(11)] * 7, wired(10), wired(7.3), wired(7), wired(10)], "FFFFFFTTTFF", id="stranded-after-a-minute"),
    pytest.param(NEEDS_REBOOT, [*[wired(11)] * 6, wired(4), *[wired(11)] * 6], "F" * 13, id="an-end-takes-time"),
])  # fmt: skip
def test_when_a_condition_begins_and_ends(
    type_: str, readings: list[MachineReading], expected: str
) -> None:
    assert truths(type_, *readings) == expected


VM_STAT = (Path(__file__).parents[1] / "hardware" / "captures" / "vm_stat.txt").read_text()


def with_wired(gib: float) -> MachineReading:
    """Return the reading of a Mac with 64 GiB and the captured output, of which so much is wired."""
    vm_stat = VM_STAT.replace("251554", str(int(gib * GIB) // 16384))
    output = ReadingOutput(vm_stat=vm_stat, sysctl=f"hw.memsize: {64 * GIB}\n")
    return macos.assemble_reading(output)


# Models may have 48 GiB of 64; 7.2 GiB wired are usual.
@pytest.mark.parametrize(("readings", "configured_gib", "expected_gib"), [
    pytest.param([with_wired(7)] * 9, 48, 48, id="usual"),
    pytest.param([with_wired(17)] * 6, 48, 48, id="an-engine-releases-its-memory"),
    pytest.param([with_wired(17)] * 9, 48, 38, id="others-hold-memory"),
    pytest.param([*[with_wired(17)] * 9, with_wired(7)], 48, 48, id="they-released-it"),
    pytest.param([*[with_wired(17)] * 9, with_wired(17.4)], 48, 38, id="a-little-more"),
    pytest.param([with_wired(17)] * 9, 24, 24, id="a-limit-that-leaves-enough"),
    pytest.param([with_wired(63)] * 9, 48, 0, id="nothing-remains"),
])  # fmt: skip
def test_models_do_not_get_what_others_wired(
    readings: list[MachineReading], configured_gib: int, expected_gib: int
) -> None:
    machine = Machine()
    machine.say(*readings)
    machine.say(with_wired(60), has_engines=True)  # the engine's own memory changes nothing
    allocatable = machine_conditions.allocatable_bytes(
        configured_gib * GIB, 48 * GIB, machine.history
    )
    assert allocatable == expected_gib * GIB


def test_stranded_memory_is_not_forgotten_while_an_engine_runs() -> None:
    assert truths(NEEDS_REBOOT, *[wired(60)] * 9, has_engines=True) == "F" * 9
    machine = Machine()
    machine.say(*[wired(11)] * 7)
    machine.say(wired(40), has_engines=True)
    assert machine.condition(NEEDS_REBOOT).status == "True"
    machine.say(wired(3), has_engines=True)
    assert machine.condition(NEEDS_REBOOT).status == "False"


def test_two_kernel_panics_within_three_days_are_a_condition() -> None:
    machine = Machine()
    first, second = (KernelPanic(at=START - timedelta(hours=hours), text="x") for hours in (71, 1))
    machine.say(MachineReading(panics=(first,)))
    assert find_condition(machine.history.conditions, KERNEL_PANICS) is None
    machine.say(MachineReading(panics=(second, first)), MachineReading())
    condition = machine.condition(KERNEL_PANICS)
    assert (condition.status, condition.reason) == ("True", "PanicsRepeatedly")
    assert "panicked 2 times within three days" in condition.message
    machine.say(*[MachineReading()] * 361)  # an hour of readings: the first one is three days old
    assert machine.condition(KERNEL_PANICS).reason == "NoMorePanics"


FREE = "were free when this began. Close programs that are not needed on this machine, or move its replicas away (fleetctl drain)"
DISK = "GiB of 400.0 GiB are free on the disk of the models, /models. Remove unused models or files until more than 7 % and 8 GiB are free"
COOLING = "Cool this machine, or reduce its load"
STRANDED = (
    "44.5 GiB of 64.0 GiB stay wired although no engine of the fleet runs: a killed engine stranded them, or another "
    "program (Ollama, LM Studio) holds them. Quit that program, or run `fleetctl node reboot NAME --drain`"
)


@pytest.mark.parametrize(("type_", "reading", "reason", "message"), [
    (MEMORY_PRESSURE, memory(3.2), "MemoryShort", f"3.2 GiB of 100.0 GiB {FREE}"),
    (MEMORY_PRESSURE, memory(3.2, level=CRITICAL), "MemoryShort", f"macOS reports critical memory pressure; 3.2 GiB of 100.0 GiB {FREE}"),
    (MEMORY_PRESSURE, memory(12, stalled=31.4), "MemoryShort", f"programs waited for memory for 31 % of a minute; 12.0 GiB of 100.0 GiB {FREE}"),
    (MEMORY_PRESSURE, NOTHING, "NotReadable", "this part of the machine cannot be read; the agent's log names the failed parts"),
    (DISK_PRESSURE, disk(3.7), "DiskAlmostFull", f"3.0 {DISK}"),
    (DISK_PRESSURE, disk(0.2), "DiskAlmostFull", f"less than 1 {DISK}"),
    (THERMAL_PRESSURE, warm(97.4), "TooWarm", f"x86_pkg_temp was at 97 °C; the machine slows down at 95 °C. {COOLING}"),
    (THERMAL_PRESSURE, SLOW, "TooWarm", f"slow. {COOLING}"),
    (THERMAL_PRESSURE, BLIND, "NoSensor", "this machine has no sensor that the agent can read, so heat is not detected"),
    (NEEDS_REBOOT, UPDATE, "UpdateWaiting", "an update waits for a restart (libc6, linux-base): `fleetctl node reboot NAME --drain`"),
    (NEEDS_REBOOT, wired(44.5), "MemoryStranded", STRANDED),
])  # fmt: skip
def test_messages(type_: str, reading: MachineReading, reason: str, message: str) -> None:
    machine = Machine()
    machine.say(*[reading] * 7)
    condition = machine.condition(type_)
    assert (condition.reason, condition.message) == (reason, message)


def test_messages_of_a_full_state_disk_and_of_slow_throttling() -> None:
    machine = Machine()
    machine.say(disk(0.9, path="/state"))
    message = machine.condition(DISK_PRESSURE).message
    assert "the disk of /state, where the agent and its engines write" in message
    machine.say(*map(throttles, (1, 2, 3)))
    message = machine.condition(THERMAL_PRESSURE).message
    assert message.startswith("the processor is throttled repeatedly. Cool")


def test_the_time_moves_with_the_truth_alone() -> None:
    machine = Machine()
    machine.say(memory(50), memory(3))
    began, first = machine.now, machine.condition(MEMORY_PRESSURE)
    machine.say(memory(2))
    assert machine.condition(MEMORY_PRESSURE) == first
    assert first.last_transition_time == began
    machine.say(memory(50))
    assert machine.condition(MEMORY_PRESSURE).last_transition_time == machine.now


def test_power_and_owner() -> None:
    machine = Machine()
    for readings, expected in (
        ([], ("Unknown", False)),
        ([MachineReading(power="Battery", owner_idle_s=299.9)], ("Battery", True)),
        ([NOTHING] * 6, ("Battery", True)),
        ([NOTHING], ("Unknown", False)),
        ([MachineReading(power="Mains", owner_idle_s=300)], ("Mains", False)),
    ):
        machine.say(*readings)
        assert (machine.history.power, machine.history.is_owner_active) == expected


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
    heat=st.none()
    | st.builds(
        HeatReading,
        has_sensor=st.booleans(),
        throttled=st.sampled_from(["", "slow"]),
        throttle_count=st.integers(0, 3),
        celsius=st.floats(0, 120),
        limit_celsius=st.sampled_from([0.0, 95.0]),
    ),
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
histories = st.lists(st.tuples(readings, st.booleans()), min_size=1, max_size=12)


def written(history: MachineHistory) -> tuple[object, ...]:
    """Return what of the history is written into the node's status."""
    disk_bytes = (history.disk_bytes, history.disk_free_bytes)
    return history.conditions, disk_bytes, history.power, history.is_owner_active


@given(histories, readings, st.booleans())
def test_a_machine_that_stays_as_it_is_becomes_quiet(
    history: list[tuple[MachineReading, bool]], last: MachineReading, has_engines: bool
) -> None:
    machine = Machine()
    for reading, engines in history:
        machine.say(reading, has_engines=engines)
    machine.say(*[last] * 9, has_engines=has_engines)
    before = written(machine.history)
    for _ in range(9):
        machine.say(last, has_engines=has_engines)
        assert written(machine.history) == before


@given(histories)
def test_all_conditions_are_there_and_the_times_are_theirs(
    history: list[tuple[MachineReading, bool]],
) -> None:
    machine = Machine()
    before: dict[str, Condition] = {}
    for reading, engines in history:
        machine.say(reading, has_engines=engines)
        now = {c.type: c for c in machine.history.conditions}
        assert list(now) == sorted(CONDITION_TYPES)
        for type_, condition in now.items():
            moved = type_ not in before or before[type_].status != condition.status
            expected = machine.now if moved else before[type_].last_transition_time
            assert condition.last_transition_time == expected
        before = now


def test_figures_that_change_continuously_are_not_reported() -> None:
    machine = Machine()
    for first, *others in (
        (memory(3), memory(3.1), memory(2.9), memory(4.5)),
        (
            replace(disk(100.2), memory=memory(2).memory),
            replace(disk(99.8), memory=memory(2.5).memory),
        ),
    ):
        machine.say(first)
        before = written(machine.history)
        machine.say(*others)
        assert written(machine.history) == before
