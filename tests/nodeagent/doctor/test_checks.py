"""Each check of a machine: facts that make it true, facts that do not, and facts that nobody could read."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from nodeagent.doctor.checks import CHECKS, run_checks
from nodeagent.doctor.engine_checks import ORPHAN_FIX
from nodeagent.doctor.host_facts import (
    BackgroundFacts,
    ClockFacts,
    EngineFacts,
    FirewallFacts,
    FolderFacts,
    HostFacts,
    Listener,
    NeighbourProbe,
    OpenFileFacts,
    ProcessOrigin,
    PythonFacts,
    Reach,
    ServiceFacts,
    ServiceKind,
    SleepFacts,
)
from nodeagent.doctor.system_checks import FIREWALL_FIX, POWER_FIX
from nodeagent.hardware.load import Macmon
from nodeagent.hardware.macos_settings import JetsamReport
from nodeagent.hardware.metal import MetalVerdict
from nodeagent.hardware.readings import DiskReading, RebootReading
from schemas.node import FabricInterface, KernelPanic, MlxBuild, NodeFabric, ThunderboltPort
from schemas.wire.findings import Finding

GIB = 2**30
STARTED = datetime(2026, 11, 22, 8, tzinfo=UTC)
AGENT = ServiceFacts(
    name="nodeagent", kind=ServiceKind.SYSTEM, pid=300, restarts=0, age_s=7200.0, last_exit=None
)
ENGINE = EngineFacts(
    replica="qwen-0", pid=400, started_at=STARTED, port=4100, is_expected=True,
    used_bytes=40 * GIB, has_fast_synch=False, in_flight=0, last_lines=("loaded",),
)  # fmt: skip
PROBE = NeighbourProbe(address="192.168.1.7", port=4001, own=Reach.REACHED)
METAL = MetalVerdict(
    is_available=True, reason="MetalWorks", message="MLX computes on M4",
    build=MlxBuild(minimum_system="26.2"),
)  # fmt: skip
HEALTHY = HostFacts(
    system="macOS",
    is_agent=True,
    python=PythonFacts(path="/opt/mlx-fleet/bin/python3.11", machine="arm64", is_translated=False),
    models=FolderFacts(path="/models", user="_mlxfleet"),
    disk=DiskReading(path="/models", total_bytes=1000 * GIB, free_bytes=500 * GIB),
    open_files=OpenFileFacts(soft=65536, hard=65536),
    clock=ClockFacts(offset_s=0.02),
    services=(AGENT,),
    background=BackgroundFacts(disabled=frozenset(), disallowed=frozenset()),
    is_user_at_screen=False,
    neighbours=(PROBE,),
    firewall=FirewallFacts(is_on=True, is_python_allowed=True),
    sleep=SleepFacts(sleep_minutes=0),
    installs_updates=False,
    has_filevault=False,
    metal=METAL,
    system_version=(26, 2),
    fabric=NodeFabric(),
    default_interface="en0",
    gpu=Macmon(gpu_ratio=0.9, gpu_watts=40.0),
    wired=RebootReading(total_bytes=64 * GIB, wired_bytes=3 * GIB),
    engines=(),
    jetsam=(),
    panics=(),
    listeners=(),
    engine_ports=range(4100, 4200),
    api_port=4001,
)


def mlx(minimum: str, system: tuple[int, int]) -> dict[str, Any]:
    """Return the facts of a Mac with this build of MLX and this macOS."""
    build = MlxBuild(tag="macosx", minimum_system=minimum)
    return {"metal": replace(METAL, build=build), "system_version": system}


def found(check: str, facts: HostFacts) -> Finding:
    """Return the worst finding of a check."""
    order = ("OK", "UNKNOWN", "WARN", "FAIL")
    several = [finding for finding in run_checks(facts) if finding.check == check]
    return max(several, key=lambda one: order.index(one.level))


def test_a_healthy_mac_has_one_ok_for_each_check() -> None:
    levels = {check.check: check.level for check in run_checks(HEALTHY)}
    assert levels == {check.name: "OK" for check in CHECKS}


def test_a_mac_of_which_nothing_could_be_read_is_never_ok() -> None:
    nothing = HostFacts(
        system="macOS", is_agent=True, python=PythonFacts(path="python", machine="arm64")
    )
    assert {check.level for check in run_checks(nothing)} == {"UNKNOWN"}
    assert {check.check for check in run_checks(nothing)} == {check.name for check in CHECKS}


def test_linux_has_no_checks_of_macos() -> None:
    names = {check.check for check in run_checks(replace(HEALTHY, system="Linux"))}
    assert names == {check.name for check in CHECKS if "Linux" in check.systems}
    assert {"ports", "disk", "clock", "crash loop"} <= names
    assert names.isdisjoint({"sleep", "firewall", "filevault", "metal", "rosetta"})


def test_each_problem_has_advice() -> None:
    for _, different, level in SITUATIONS:
        for check in run_checks(replace(HEALTHY, **different)):
            assert check.advice or check.level in ("OK", "UNKNOWN"), check
        assert level in ("OK", "WARN", "FAIL", "UNKNOWN")


def probes(own: Reach, tool: Reach | None) -> dict[str, Any]:
    return {"neighbours": (replace(PROBE, own=own, tool=tool),)}


def service(**different: Any) -> dict[str, Any]:
    return {"services": (replace(AGENT, **different),)}


def engine(**different: Any) -> dict[str, Any]:
    return {"engines": (replace(ENGINE, **different),)}


def bridge(*peers: str) -> dict[str, Any]:
    ports = [
        ThunderboltPort(receptacle=str(n), interface=f"en{n}", peer=peer, is_bridged=True)
        for n, peer in enumerate(peers, 1)
    ]
    return {"fabric": NodeFabric(ports=tuple(ports))}


OOM = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
TIMEOUT = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
SPIN = {"gpu": Macmon(gpu_ratio=1.0, gpu_watts=4.1)}
WIRED = {"wired": RebootReading(total_bytes=64 * GIB, wired_bytes=40 * GIB)}
LABELS = frozenset(("io.mlxfleet.nodeagent", "com.example.other"))
ORPHAN = ProcessOrigin(is_orphan=True, reaches_loopback=True)
OFFLINE = replace(ORPHAN, reaches_loopback=False)
CABLED = NodeFabric(
    ports=(ThunderboltPort(receptacle="1", interface="en3"),),
    interfaces=(FabricInterface(name="bridge0", address="192.168.1.9", is_thunderbolt=True),),
)
OLLAMA = Listener(port=4100, pid=77, program="ollama")

PANIC = KernelPanic(at=STARTED, text="userspace watchdog timeout")
SITUATIONS: list[tuple[str, dict[str, Any], str]] = [
    ("background item", {"background": BackgroundFacts(disabled=frozenset())}, "OK"),
    ("background item", {"background": BackgroundFacts(disabled=LABELS)}, "FAIL"),
    ("background item", {"background": BackgroundFacts(disabled=frozenset(), disallowed=LABELS)}, "FAIL"),
    ("background item", {"background": BackgroundFacts(disabled=LABELS), "services": ()}, "OK"),
    # 1: errno 65 for our own socket, while Apple's nc passes.
    ("local network", probes(Reach.UNREACHABLE, Reach.REACHED), "FAIL"),
    ("local network", probes(Reach.SILENT, Reach.REACHED), "FAIL"),
    ("local network", probes(Reach.UNREACHABLE, Reach.UNREACHABLE), "UNKNOWN"),
    ("local network", probes(Reach.UNREACHABLE, None), "UNKNOWN"),
    ("local network", {**probes(Reach.UNREACHABLE, Reach.UNREACHABLE), "origin": ORPHAN}, "FAIL"),
    ("local network", {**probes(Reach.SILENT, Reach.SILENT), "origin": ORPHAN}, "UNKNOWN"),
    ("local network", {**probes(Reach.UNREACHABLE, None), "origin": OFFLINE}, "UNKNOWN"),
    *(
        ("default route", {"fabric": CABLED, "default_interface": name}, level)
        for name, level in (("bridge0", "FAIL"), ("en3", "FAIL"), ("en0", "OK"), (None, "UNKNOWN"))
    ),
    # 2
    ("firewall", {"firewall": FirewallFacts(is_on=True, blocks_all=True)}, "FAIL"),
    ("firewall", {"firewall": FirewallFacts(is_on=True, is_python_allowed=False)}, "WARN"),
    ("firewall", {"firewall": FirewallFacts(is_on=True)}, "UNKNOWN"),
    ("firewall", {"firewall": FirewallFacts(is_on=False)}, "OK"),
    # 3
    ("sleep", {"sleep": SleepFacts(sleep_minutes=10)}, "FAIL"),
    ("sleep", {"sleep": SleepFacts(sleep_minutes=10, blockers=("caffeinate",))}, "WARN"),
    ("sleep", {"sleep": SleepFacts(sleep_minutes=0, is_low_power=True)}, "WARN"),
    ("sleep", {"slept_s": 3600.0}, "WARN"),
    ("sleep", {"slept_s": 0.5}, "OK"),
    # 4, 5
    ("updates", {"installs_updates": True}, "WARN"),
    ("filevault", {"has_filevault": True}, "WARN"),
    # 6
    ("service definition", service(differences=("ExitTimeOut is 5 instead of 30",)), "WARN"),
    ("service definition", service(differences=None), "UNKNOWN"),
    ("service definition", {"services": ()}, "OK"),
    # 7: many restarts in a long life are no loop.
    ("crash loop", service(restarts=6, age_s=4.0), "FAIL"),
    ("crash loop", service(restarts=233, pid=None, age_s=None, last_exit=78), "FAIL"),
    ("crash loop", service(restarts=6, age_s=86_400.0), "OK"),
    ("crash loop", service(restarts=5, age_s=4.0), "OK"),
    ("crash loop", service(restarts=None), "UNKNOWN"),
    # 8
    ("open files", {"open_files": OpenFileFacts(soft=256, hard=None)}, "FAIL"),
    ("open files", {"open_files": OpenFileFacts(soft=256, hard=256)}, "FAIL"),
    ("open files", {"open_files": OpenFileFacts(soft=None, hard=None)}, "OK"),
    # 9
    ("login session", service(kind=ServiceKind.GUI), "FAIL"),
    ("login session", {**service(kind=ServiceKind.GUI), "is_user_at_screen": True}, "WARN"),
    # 10, 11
    ("metal", {"metal": MetalVerdict(is_available=False, reason="MetalMissing", message="no")}, "FAIL"),
    ("mlx build", {"metal": replace(METAL, build=None)}, "UNKNOWN"),
    ("mlx build", mlx("", (26, 2)), "UNKNOWN"),
    ("mlx build", mlx("14.0", (14, 5)), "OK"),
    ("mlx build", mlx("14.0", (15, 1)), "OK"),
    ("mlx build", mlx("14.0", (26, 2)), "WARN"),
    ("mlx build", mlx("15.0", (27, 0)), "WARN"),
    ("mlx build", mlx("15.0", (26, 1)), "WARN"),
    ("mlx build", mlx("26.2", (26, 1)), "FAIL"),
    ("mlx build", mlx("26.2", (26, 5)), "OK"),
    ("rosetta", {"python": PythonFacts(path="p", machine="x86_64", is_translated=True)}, "FAIL"),
    ("rosetta", {"python": PythonFacts(path="p", machine="x86_64", is_translated=False)}, "FAIL"),
    # 12
    ("models folder", {"models": FolderFacts(path="/m", error="refused", reason="EPERM", user="u")}, "FAIL"),
    ("models folder", {"models": FolderFacts(path="/m", error="missing", user="u")}, "WARN"),
    # 18: one cable, or a chain, makes no loop; a ring may; two cables to one Mac do.
    ("thunderbolt bridge", bridge("A"), "OK"),
    ("thunderbolt bridge", bridge("A", ""), "OK"),
    ("thunderbolt bridge", bridge("A", "B"), "WARN"),
    ("thunderbolt bridge", bridge("A", "A"), "FAIL"),
    # 26
    ("gpu spin", {**SPIN, **engine()}, "FAIL"),
    ("gpu spin", {**SPIN, **engine(in_flight=1)}, "OK"),
    ("gpu spin", {**SPIN, **engine(in_flight=None)}, "OK"),
    ("gpu spin", engine(has_fast_synch=True), "WARN"),
    ("gpu spin", {"gpu": None, **engine()}, "UNKNOWN"),
    # 27
    ("wired memory", WIRED, "WARN"),
    ("wired memory", {**WIRED, **engine()}, "UNKNOWN"),
    # 28
    ("memory kills", engine(last_lines=("loaded", OOM), pid=None), "FAIL"),
    ("memory kills", engine(last_lines=(OOM,), pid=None, is_past=True), "WARN"),
    ("memory kills", {**engine(), "jetsam": (JetsamReport(at=STARTED + timedelta(hours=1), killed=("python3.11",)),)}, "WARN"),
    ("memory kills", {**engine(), "jetsam": (JetsamReport(at=STARTED - timedelta(hours=1), killed=("python3.11",)),)}, "OK"),
    ("kernel panics", {"panics": (PANIC,)}, "WARN"),
    ("kernel panics", {"panics": (PANIC, PANIC)}, "FAIL"),
    ("kernel panics", {"panics": None}, "UNKNOWN"),
    # 29
    ("gpu timeout", engine(last_lines=(TIMEOUT,)), "FAIL"),
    ("gpu timeout", engine(last_lines=("a request timed out",)), "OK"),
    # 30
    ("stopped engines", engine(is_expected=False), "FAIL"),
    ("stopped engines", engine(is_expected=False, pid=None), "OK"),
    ("stopped engines", engine(is_expected=None), "UNKNOWN"),
    ("stopped engines", engine(), "OK"),
    # 33
    ("disk", {"disk": DiskReading(path="/models", total_bytes=1000 * GIB, free_bytes=9 * GIB)}, "WARN"),
    ("disk", {"disk": DiskReading(path="/models", total_bytes=1000 * GIB, free_bytes=GIB - 1)}, "FAIL"),
    # 34
    ("ports", {"listeners": (OLLAMA,)}, "WARN"),
    ("ports", {"listeners": (OLLAMA,), "engine_ports": range(4100, 4101)}, "FAIL"),
    ("ports", {"listeners": (replace(OLLAMA, port=4001),)}, "FAIL"),
    ("ports", {"listeners": (replace(OLLAMA, is_fleet=True),)}, "OK"),
    ("ports", {"listeners": (replace(OLLAMA, port=5000),)}, "OK"),
    # 35
    ("clock", {"clock": ClockFacts(offset_s=-5.0)}, "WARN"),
    ("clock", {"clock": ClockFacts(offset_s=86_400.0)}, "FAIL"),
    ("clock", {"clock": ClockFacts(is_synchronized=False)}, "WARN"),
    ("clock", {"clock": ClockFacts(is_synchronized=True)}, "OK"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "different", "level"), SITUATIONS)
def test_a_situation_has_its_level(check: str, different: dict[str, Any], level: str) -> None:
    assert found(check, replace(HEALTHY, **different)).level == level


@pytest.mark.parametrize(("check", "different", "fix"), [
    ("sleep", {"sleep": SleepFacts(sleep_minutes=10)}, POWER_FIX),
    ("firewall", {"firewall": FirewallFacts(is_on=True, is_python_allowed=False)}, FIREWALL_FIX),
    ("stopped engines", engine(is_expected=False), ORPHAN_FIX),
    ("updates", {"installs_updates": True}, ""),
    ("filevault", {"has_filevault": True}, ""),
])  # fmt: skip
def test_only_what_is_safe_has_an_automatic_fix(
    check: str, different: dict[str, Any], fix: str
) -> None:
    assert found(check, replace(HEALTHY, **different)).fix == fix


def test_a_message_says_what_and_where_and_since_when() -> None:
    orphan = found("stopped engines", replace(HEALTHY, **engine(is_expected=False)))
    assert orphan.message == (
        "an engine of replica/qwen-0 still runs on port 4100 and holds 40.0 GiB, and its agent does not know it (pid 400)"
    )
    assert (orphan.advice, orphan.since) == ("kill 400", STARTED)
    taken = found("ports", replace(HEALTHY, listeners=(OLLAMA,)))
    assert taken.message == "1 of the engines' ports are taken: 4100 by ollama (pid 77)"
