"""Comparisons that no transcript reaches: rights, launchd, the network, an engine."""

from dataclasses import replace

import pytest

from fleetctl.mac_report.checks import compare
from fleetctl.mac_report.collect import parse_probes
from fleetctl.mac_report.readings import (
    CommandRun,
    EngineMemory,
    LaunchdTimings,
    NetworkProbe,
    Readings,
    RunContext,
    SecondSources,
    Verdict,
)
from machinery import macos_commands as mac
from tests.support import mac_transcripts

GIB = 2**30
RUNS = {
    command: CommandRun(argv=(), out=text)
    for command, text in mac_transcripts.transcripts().items()
}
SOURCES = SecondSources(
    machine="arm64", version="26.2", memory_bytes=64 * GIB, wired_bytes=None, addresses=frozenset()
)
READINGS = Readings(runs={RunContext.USER: RUNS}, sources=SOURCES)
GOOD = LaunchdTimings(
    open_files=65536, bootout_s=(0.2,), bootstrap_codes=((5, 0), (0,)), stopped_bootout_s=5.3, pid_matches=True,
    log_bytes_before=640, log_bytes_after_truncate=5,
)  # fmt: skip
ENGINE = EngineMemory(
    footprint=9 * GIB, weights=8 * GIB, wired_before=2 * GIB, wired_loaded=10 * GIB,
    wired_after_end=2 * GIB, wired_after_kill=2 * GIB, thermal_before=0, thermal_after=1,
)  # fmt: skip


def verdict(readings: Readings, name: str) -> Verdict:
    return next(c.verdict for c in compare(readings) if c.name == name)


def test_an_account_that_reads_less_is_named() -> None:
    role = {command: run for command, run in RUNS.items() if command is not mac.HARDWARE}
    readings = replace(
        READINGS, runs={RunContext.USER: RUNS, RunContext.ROLE: role, RunContext.DAEMON: RUNS}
    )
    comparison = next(c for c in compare(readings) if c.name == "read as role")
    assert comparison.verdict is Verdict.DIFFERS
    assert comparison.detail == "read differently: profiler-hardware"
    assert verdict(readings, "read as daemon") is Verdict.HOLDS


@pytest.mark.parametrize(
    ("timings", "failing"),
    [
        pytest.param(GOOD, "", id="as production assumes"),
        pytest.param(replace(GOOD, open_files=256), "open files", id="launchd's own limit"),
        pytest.param(replace(GOOD, pid_matches=False), "launchd pid", id="another pid"),
        pytest.param(replace(GOOD, bootstrap_codes=((17, 0),)), "bootstrap after bootout", id="a code that is not retried"),
        pytest.param(replace(GOOD, bootstrap_codes=((5, 5, 5),)), "bootstrap after bootout", id="never loaded"),
        pytest.param(replace(GOOD, bootout_s=(0.2, 60.0)), "bootout", id="a job that stays"),
        pytest.param(replace(GOOD, stopped_bootout_s=None), "bootout of a stopped process", id="no kill at ExitTimeOut"),
        pytest.param(replace(GOOD, log_bytes_after_truncate=645), "log after truncate", id="a log with a gap"),
    ],
)  # fmt: skip
def test_what_production_assumes_of_launchd(timings: LaunchdTimings, failing: str) -> None:
    names = ("open files", "launchd pid", "bootstrap after bootout", "bootout", "bootout of a stopped process", "log after truncate")  # fmt: skip
    readings = replace(READINGS, launchd=timings)
    assert [name for name in names if verdict(readings, name) is Verdict.DIFFERS] == (
        [failing] if failing else []
    )


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({}, ""),
        ({"footprint": GIB}, "footprint"),
        ({"wired_after_end": 9 * GIB}, "wired after SIGTERM"),
        ({"wired_after_kill": 9 * GIB}, "wired after SIGKILL"),
        ({"thermal_after": None}, "thermal level"),
    ],
)
def test_memory_around_an_engine(change: dict[str, int], failing: str) -> None:
    readings = replace(READINGS, engine=replace(ENGINE, **change))
    names = ("footprint", "wired after SIGTERM", "wired after SIGKILL", "thermal level")
    assert [name for name in names if verdict(readings, name) is Verdict.DIFFERS] == (
        [failing] if failing else []
    )


def test_only_exempt_processes_must_reach_the_local_network() -> None:
    def probe(process: str, error: int) -> NetworkProbe:
        return NetworkProbe(
            process=process, interface="en0", action="connect", target="192.168.1.7", error=error
        )

    probes = [
        probe("terminal", 0),
        probe("orphan", 65),
        probe("daemon-root", 65),
        probe("daemon-role", -1),
    ]
    readings = replace(READINGS, network=probes)
    assert verdict(readings, "local network of terminal") is Verdict.HOLDS
    # What the report is to find out is not a failure.
    assert verdict(readings, "local network of orphan") is Verdict.NOT_ASKED
    assert verdict(readings, "local network of daemon-root") is Verdict.DIFFERS
    assert verdict(readings, "local network of daemon-role") is Verdict.HOLDS


def test_what_was_asked_for_and_failed_is_missing() -> None:
    readings = replace(READINGS, asked=frozenset({"sudo", "model"}), notes=("sudo: no password",))
    for name in ("read as role", "read as daemon", "launchd", "engine"):
        assert verdict(readings, name) is Verdict.MISSING
        assert verdict(READINGS, name) is Verdict.NOT_ASKED


@pytest.mark.parametrize(
    "text", ["", "Traceback", "[[1]]", '{"a": 1}', '[["en0", "connect", "x", "y"]]']
)
def test_a_probe_that_printed_something_else_counts_as_none(text: str) -> None:
    assert parse_probes("orphan", text) == []
