"""A whole report, with programs that replay transcripts at the place of macOS's."""

import json
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleetctl.mac_report.collect import ReportSettings, collect_report
from fleetctl.mac_report.mac_programs import LABEL, MacPlace
from fleetctl.mac_report.readings import SecondSources, Verdict
from fleetctl.mac_report.report import FILE, Report
from fleetctl.support_bundle.contents import BundleArchive
from fleetctl.verbs.mac_report import mac_report
from fleetctl.verbs.support_bundle import add_mac
from machinery import macos_commands as mac
from machinery.clock import SystemClock
from machinery.macos_commands import COMMANDS, MacCommand
from tests.mac_captures.import_report import BadArchiveError, import_report
from tests.support import mac_transcripts, service_stand_ins

GIB = 2**30
CHECK = json.dumps({
    "device": "Apple M4 Pro", "isMetal": True, "isRight": True,
    "mlxBuild": {"tag": "macosx_26_0_arm64", "minimumSystem": "26.2", "hasJaccl": True, "hasNax": True},
    "metalDevice": {"architecture": "applegpu_g16s", "memoryBytes": 64 * GIB, "recommendedBytes": 55662788608,
                    "maxBufferBytes": 41747091456},
})  # fmt: skip


def settings_of(
    tmp_path: Path, outputs: dict[MacCommand, str], *, state: Path | None = None
) -> ReportSettings:
    mac_transcripts.install(tmp_path / "bin", outputs, state=state)
    place = MacPlace(
        programs=tmp_path / "bin",
        daemons=tmp_path,
        agents=tmp_path / "agents",
        scratch=str(tmp_path),
    )
    studio = (("en0", "192.168.1.22"), ("en3", "10.0.1.2"), ("utun0", "100.64.0.7"))
    sources = SecondSources(
        machine="arm64",
        version="26.2",
        memory_bytes=64 * GIB,
        wired_bytes=None,
        addresses=frozenset(studio),
    )
    check = mac_transcripts.device_check(tmp_path, CHECK)
    return ReportSettings(
        key="words",
        place=place,
        sources=sources,
        device_check=check,
        has_sudo=state is not None,
        repetitions=2,
    )


async def collect(settings: ReportSettings) -> Report:
    lines: list[str] = []
    return await collect_report(settings, SystemClock(), lines.append)


async def test_a_report_whose_sources_agree_holds_and_hides_who_wrote_it(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, mac_transcripts.transcripts())
    report = await collect(settings)
    assert [c for c in report.comparisons if c.verdict in (Verdict.DIFFERS, Verdict.MISSING)] == []
    assert report.holds
    archive = tmp_path / "mac.tar.gz"
    report.write(archive)
    with tarfile.open(archive) as opened:
        names = opened.getnames()
        text = opened.extractfile(f"mac-report/{FILE}").read().decode()  # type: ignore[union-attr]
    assert names == [f"mac-report/{FILE}", "mac-report/README.txt"]
    for detail in (
        "annas-mini",
        "/Users/anna",
        "192.168.1.11",
        "11111111-AAAA-5BBB",
        "2:0:0:0:0:7",
    ):
        assert detail not in text
    runs = json.loads(text)["runs"]["user"]
    assert set(runs) == {
        c.name for c in COMMANDS.values() if not c.is_change and c.rights == "User"
    }
    assert runs["sysctl-facts"]["parsed"]["hw.model"] == "Mac16,11"
    # A command that this Mac does not know is in the report, too.
    assert runs["sntp"]["code"] == 1
    (tmp_path / "captures").mkdir()
    folder = import_report(archive, tmp_path / "captures")
    assert folder.name == "Mac16,11-25C56"
    assert (
        json.loads((folder / "expected.json").read_text())["profiler-hardware"]["gpu_cores"] == 20
    )
    with pytest.raises(BadArchiveError, match="exists"):
        import_report(archive, tmp_path / "captures")


@pytest.mark.parametrize(
    ("command", "old", "new", "failing"),
    [
        pytest.param(mac.HARDWARE, '"64 GB"', '"32 GB"', "memory", id="memory"),
        pytest.param(mac.GPU_REGISTRY, "= 20", "= 16", "gpu cores", id="gpu cores"),
        pytest.param(mac.TRANSLATED, ": 0", ": 1", "translated", id="rosetta"),
        pytest.param(mac.BUILD, "25C56", "25C57", "build", id="build"),
        pytest.param(mac.RDMA_STATUS, "enabled", "disabled", "rdma devices", id="rdma"),
        pytest.param(mac.HARDWARE_PORTS, "Thunderbolt 1\n", "Thunderbolt 9\n", "thunderbolt ports", id="ports"),
        pytest.param(mac.INTERFACES, "192.168.1.22 ", "192.168.1.23 ", "addresses", id="addresses"),
    ],
)  # fmt: skip
async def test_a_source_that_says_something_else_fails_the_report(
    tmp_path: Path, command: MacCommand, old: str, new: str, failing: str
) -> None:
    outputs = mac_transcripts.transcripts()
    assert old in outputs[command]
    report = await collect(
        settings_of(tmp_path, outputs | {command: outputs[command].replace(old, new)})
    )
    assert not report.holds
    assert [c.name for c in report.comparisons if c.verdict is Verdict.DIFFERS] == [failing]


async def test_a_missing_source_is_no_agreement(tmp_path: Path) -> None:
    outputs = mac_transcripts.transcripts()
    del outputs[mac.GPU_REGISTRY], outputs[mac.VM_STAT]
    report = await collect(settings_of(tmp_path, outputs))
    missing = [c.name for c in report.comparisons if c.verdict is Verdict.MISSING]
    assert missing == ["gpu cores", "pages"]
    assert not report.holds
    assert "2 of" in report.summary()[-1]


async def test_a_support_bundle_of_a_mac_holds_the_report(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, mac_transcripts.transcripts())
    path = tmp_path / "bundle.tar.gz"
    with path.open("wb") as file:
        archive = BundleArchive(file, "bundle", datetime(2026, 11, 29, tzinfo=UTC), 64 << 20)
        await add_mac(archive, settings, len)
        archive.finish()
    assert archive.missing == []
    with tarfile.open(path) as opened:
        content = opened.extractfile("bundle/mac-report.json")
        assert content is not None
        tree = json.loads(content.read())
    assert tree["model"] == "Mac16,11"
    assert tree["runs"]["user"]["vm_stat"]["out"].startswith("Mach Virtual")


def test_on_another_system_the_verb_says_where_to_run_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(mac_report, ["-o", str(tmp_path / "mac.tar.gz")])
    assert result.exit_code == 1
    assert (
        result.output
        == "error: mac-report reads macOS, and this machine runs linux; run it on the Mac\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    service_stand_ins.end_jobs(tmp_path / "state")


async def test_with_sudo_the_account_and_a_daemon_read_the_same_and_nothing_stays(
    tmp_path: Path, state: Path
) -> None:
    settings = settings_of(tmp_path, mac_transcripts.transcripts(), state=state)
    report = await collect(settings)
    runs = report.tree["runs"]
    assert set(runs) == {"user", "role", "daemon"}
    assert runs["daemon"]["vm_stat"]["out"] == runs["user"]["vm_stat"]["out"]
    assert runs["daemon"]["sfltool"]["code"] == 1
    by_name = {c.name: c for c in report.comparisons}
    assert by_name["read as role"].verdict is Verdict.HOLDS
    assert by_name["read as daemon"].verdict is Verdict.HOLDS
    launchd = report.tree["measured"]["launchd"]
    assert len(launchd["bootout_s"]) == len(launchd["bootstrap_codes"]) == 2
    assert all(codes[-1] == 0 and set(codes) <= {0, 5, 37} for codes in launchd["bootstrap_codes"])
    assert launchd["pid_matches"]
    kinds = {probe["process"] for probe in report.tree["measured"]["network"]}
    assert {"terminal", "orphan"} <= kinds
    assert not (tmp_path / f"{LABEL}.plist").exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(LABEL)] == []
