"""The facts of a Mac from recorded output, and what the checks make of them."""

import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nodeagent.doctor import macos_facts
from nodeagent.doctor.checks import run_checks
from nodeagent.doctor.collector import collect_facts
from nodeagent.doctor.host_facts import HostFacts, NeighbourProbe, Reach, ServiceKind
from nodeagent.doctor.readers import CollectionScope
from nodeagent.hardware.metal import MetalVerdict
from schemas.node import MlxBuild
from tests.support.clock import FakeClock
from tests.support.launchd_jobs import job

CAPTURES = Path(__file__).parents[1] / "hardware" / "captures" / "settings"
FILES = {
    "pmset -g custom": "pmset_custom.txt",
    "pmset -g assertions": "pmset_assertions.txt",
    "sysctl kern.sleeptime": "sleeptime.txt",
    "sysctl sysctl.proc_translated": "translated.txt",
    "sysctl kern.memorystatus_vm_pressure_level hw.memsize": "memory.txt",
    "vm_stat": "vm_stat.txt",
    "sw_vers": "sw_vers.txt",
    "socketfilterfw --getglobalstate": "globalstate.txt",
    "socketfilterfw --getblockall": "blockall.txt",
    "socketfilterfw --listapps": "listapps.txt",
    "defaults read /Library/Preferences/com.apple.SoftwareUpdate": "software_update.txt",
    "fdesetup status": "fdesetup.txt",
    "stat -f %Su /dev/console": "console.txt",
    "sntp -t 3 time.apple.com": "sntp.txt",
    "netstat -anv -p tcp": "netstat.txt",
    "macmon pipe -s 1 -i 200": "macmon.json",
    "launchctl print-disabled system": "print_disabled.txt",
    "sfltool dumpbtm": "sfltool.txt",
    "launchctl print system/io.mlxfleet.nodeagent": "launchctl_print.txt",
}


class Recorded:
    """Commands of a Mac that print what was recorded; those that were not cannot be run."""

    def __init__(self, folder: str) -> None:
        self._folder = CAPTURES / folder

    async def __call__(self, argv: Sequence[str]) -> str | None:
        words = " ".join((Path(argv[0]).name, *argv[1:]))
        file = self._folder / FILES.get(words, "none")
        if not file.exists():
            return None
        return file.read_text().replace("@PYTHON@", str(Path(sys.executable).resolve()))


CLOCK = FakeClock()


async def works() -> MetalVerdict:
    build = MlxBuild(tag="macosx_26_0_arm64", minimum_system="26.2", has_jaccl=True, has_nax=True)
    return MetalVerdict(is_available=True, reason="MetalWorks", message="on M4", build=build)


async def facts_of(folder: str, root: Path) -> HostFacts:
    for name in ("LaunchDaemons", "Logs/DiagnosticReports"):
        (root / "Library" / name).mkdir(parents=True)
    (root / "models").mkdir()
    for report in (CAPTURES / folder).glob("*.ips"):
        shutil.copy(report, root / "Library/Logs/DiagnosticReports")
    plist = job(ExitTimeOut=5) if folder == "ill" else job()
    (root / "Library/LaunchDaemons/io.mlxfleet.nodeagent.plist").write_bytes(plist)
    scope = CollectionScope(
        models_dir=root / "models", engine_folders=(root / "engines",), engine_ports=range(4100, 4200),
        api_port=4001, metal=works, root=root, home=root / "home",
        is_root=True,
    )  # fmt: skip
    return await collect_facts(scope, CLOCK, run=Recorded(folder), platform="darwin")


async def test_a_mac_that_is_well(tmp_path: Path) -> None:
    facts = await facts_of("well", tmp_path)
    levels = {check.check: check.level for check in run_checks(facts)}
    good = (
        "metal", "mlx build", "firewall", "sleep", "updates", "filevault", "service definition", "login session", "background item",
        "models folder", "clock", "ports",
    )  # fmt: skip
    assert {name: levels[name] for name in good} == dict.fromkeys(good, "OK")
    # No other machine was recorded, and launchctl did not answer.
    assert levels["local network"] == levels["crash loop"] == "UNKNOWN"


async def test_a_mac_that_is_ill(tmp_path: Path) -> None:
    facts = await facts_of("ill", tmp_path)
    findings = {check.check: check for check in reversed(run_checks(facts)) if check.level != "OK"}
    levels = {
        "rosetta": "FAIL", "mlx build": "FAIL", "firewall": "FAIL", "sleep": "WARN", "updates": "WARN", "filevault": "WARN",
        "service definition": "WARN", "background item": "FAIL", "crash loop": "FAIL", "clock": "FAIL", "ports": "WARN",
    }  # fmt: skip
    assert {name: findings[name].level for name in levels} == levels
    assert (
        "ended 233 times by itself, the last time with exit code 78"
        in findings["crash loop"].message
    )
    assert "ExitTimeOut is 5 instead of 30 or more" in findings["service definition"].message
    assert "4103 by a program (pid 99999998)" in findings["ports"].message
    assert facts.jetsam is not None
    assert [report.killed for report in facts.jetsam] == [("python3.11",)]
    assert facts.gpu is not None
    assert (facts.gpu.gpu_ratio, facts.gpu.gpu_watts) == (1.0, 4.1)
    assert facts.sleep is not None
    assert facts.sleep.last_slept_at == datetime(2026, 11, 22, 20, 10, tzinfo=UTC)


async def test_a_job_of_a_user_is_seen_in_its_domain(tmp_path: Path) -> None:
    agents = tmp_path / "home" / "Library" / "LaunchAgents"
    agents.mkdir(parents=True)
    (agents / "io.mlxfleet.gateway.plist").write_bytes(job())
    facts = await facts_of("ill", tmp_path)
    assert facts.services is not None
    assert [(service.name, service.kind) for service in facts.services] == [
        ("nodeagent", ServiceKind.SYSTEM),
        ("gateway", ServiceKind.GUI),
    ]
    [finding] = [check for check in run_checks(facts) if check.check == "login session"]
    assert finding.level == "FAIL"  # root owns the console


async def test_a_denied_neighbour_is_told_from_one_that_is_away() -> None:
    async def tool(argv: Sequence[str]) -> str | None:
        assert argv[-2:] == ("192.0.2.7", "22")
        return (CAPTURES / "ill" / "nc.txt").read_text()

    probe = await macos_facts.probe(tool, "192.0.2.7", 22)
    # Nothing answers at this address for documentation, so our own socket fails for real.
    assert probe.own is not Reach.REACHED
    assert probe.is_denied


@pytest.mark.parametrize(("text", "reach"), [
    ("Connection to 192.168.1.7 port 22 [tcp/ssh] succeeded!", Reach.REACHED),
    ("nc: connectx to 192.168.1.7 port 22 (tcp) failed: Connection refused", Reach.REACHED),
    ("nc: connectx to 192.168.1.7 port 22 (tcp) failed: No route to host", Reach.UNREACHABLE),
    ("nc: connectx to 192.168.1.7 port 22 (tcp) failed: Operation timed out", Reach.SILENT),
    ("", Reach.SILENT),
])  # fmt: skip
def test_what_nc_says(text: str, reach: Reach) -> None:
    assert macos_facts.parse_nc(text) is reach


async def test_denials_in_the_log_are_counted_only_after_a_denial(tmp_path: Path) -> None:
    async def run(argv: Sequence[str]) -> str | None:
        name = {"log": "log_show.txt", "arp": "arp.txt", "route": "route.txt", "sh": "nc.txt"}
        file = CAPTURES / "ill" / name.get(Path(argv[0]).name, "none")
        # Addresses for documentation: nothing answers there.
        return file.read_text().replace("192.168.1.", "192.0.2.") if file.exists() else None

    assert await macos_facts.count_denials(run) == 2
    scope = CollectionScope(models_dir=tmp_path, root=tmp_path, home=tmp_path)
    facts = await collect_facts(scope, CLOCK, run=run, platform="darwin")
    assert facts.neighbours is not None
    [probe] = facts.neighbours
    assert isinstance(probe, NeighbourProbe)
    assert facts.denials == (2 if probe.is_denied else None)


@pytest.mark.parametrize("printed", [
    pytest.param("", id="not-installed"),
    pytest.param("error: no IOReport", id="no-json"),
    pytest.param('{"gpu_active_ratio": 0.9}', id="no-power"),
    pytest.param('{"gpu_power": 3.5}', id="no-use"),
    pytest.param('{"gpu_active_ratio": 0.9, "gpu_power": -1}', id="impossible-power"),
])  # fmt: skip
def test_a_gpu_of_which_macmon_shows_only_a_part_is_unknown(printed: str) -> None:
    assert macos_facts.parse_gpu(printed) is None
