"""Jobs of launchd: their property lists, and launchctl's answers, which a stand-in program gives."""

import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typing_extensions import override

from fleetctl.services import launchd as launchd_adapter
from fleetctl.services.launchd import LaunchdServices
from fleetctl.services.port import ServiceError, ServiceSpec
from machinery.clock import SystemClock
from nodeagent.hardware.service_definitions import parse_print
from tests.fleetctl.services.conftest import Bench

SPEC = ServiceSpec(
    name="nodeagent",
    command=("/opt/mlx-fleet/current/bin/fleet-nodeagent", "--etcd", "https://mac-1:2379"),
    log=Path("/Library/Logs/mlx-fleet/nodeagent.log"),
    working_folder=Path("/Library/Application Support/mlx-fleet"),
    python=Path("/opt/mlx-fleet/current/bin/python"),
    user="_mlxfleet",
    group="_mlxfleet",
    environment=(("HOME", "/var/empty"), ("LANG", "en_US.UTF-8")),
)
EXPECTED = {
    "Label": "io.mlxfleet.nodeagent",
    "ProgramArguments": list(SPEC.command),
    "UserName": "_mlxfleet",
    "GroupName": "_mlxfleet",
    "RunAtLoad": True,
    "KeepAlive": True,
    "ThrottleInterval": 10,
    "ExitTimeOut": 30,
    "AbandonProcessGroup": True,
    "ProcessType": "Interactive",
    "SoftResourceLimits": {"NumberOfFiles": 65536},
    "HardResourceLimits": {"NumberOfFiles": 65536},
    "StandardOutPath": "/Library/Logs/mlx-fleet/nodeagent.log",
    "StandardErrorPath": "/Library/Logs/mlx-fleet/nodeagent.log",
    "EnvironmentVariables": {"HOME": "/var/empty", "LANG": "en_US.UTF-8"},
    "WorkingDirectory": "/Library/Application Support/mlx-fleet",
}
# The form of `launchctl print` in public reports, shortened: nested blocks have keys of the same names.
PRINTED = """system/com.example.agent = {
\tactive count = 1
\tpath = /Library/LaunchDaemons/com.example.agent.plist
\ttype = LaunchDaemon
\tstate = running

\tprogram = /usr/local/bin/agent
\tdefault environment = {
\t\tPATH => /usr/bin:/bin:/usr/sbin:/sbin
\t}

\tdomain = system
\tminimum runtime = 10
\texit timeout = 30
\truns = 3
\tpid = 4711
\timmediate reason = semaphore
\tforks = 0
\tlast exit code = 78: EX_CONFIG

\tspawn type = interactive (4)
\tresource coalition = {
\t\tID = 906
\t\tstate = active
\t\tpid = 1
\t}
}
"""


def test_the_plist_of_the_agent_is_the_specified_one() -> None:
    written = plistlib.loads(launchd_adapter.service_plist(SPEC))
    assert written == EXPECTED
    launchd_adapter.check(written)


def test_the_log_is_truncated_and_not_renamed() -> None:
    written = plistlib.loads(launchd_adapter.rotation_plist(SPEC))
    launchd_adapter.check(written)
    assert written["StartInterval"] == 60
    assert written["ProgramArguments"][1:] == ["-m", "machinery.log_rotation", str(SPEC.log)]
    assert "KeepAlive" not in written


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("KeepAlife", True, "no key KeepAlife"),
        ("KeepAlive", 1, "no key KeepAlive of type int"),
        ("ExitTimeOut", True, "no key ExitTimeOut of type bool"),
        ("ProcessType", "Fast", "ProcessType Fast"),
        ("ProgramArguments", ["fleet-nodeagent"], "absolute path"),
    ],
)
def test_a_key_that_launchd_would_ignore_is_refused(key: str, value: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        launchd_adapter.check({**EXPECTED, key: value})


@pytest.mark.mac
def test_plutil_accepts_the_plists(tmp_path: Path) -> None:
    for content in (launchd_adapter.service_plist(SPEC), launchd_adapter.rotation_plist(SPEC)):
        path = tmp_path / "job.plist"
        path.write_bytes(content)
        subprocess.run(["plutil", "-lint", str(path)], check=True, timeout=30)


def test_only_the_outermost_block_of_a_print_counts() -> None:
    job = parse_print(PRINTED)
    assert (job.pid, job.runs, job.last_exit, job.exit_timeout_s) == (4711, 3, 78, 30.0)
    never = parse_print("system/a = {\n\truns = 0\n\tlast exit code = (never exited)\n}\n")
    assert (never.pid, never.last_exit) == (None, None)


launchd = pytest.mark.parametrize("bench", ["launchd"], indirect=True)


def calls(bench: Bench, verb: str) -> list[str]:
    lines = (bench.tools / "calls").read_text().splitlines()
    return [line for line in lines if line.startswith(f"launchctl {verb}")]


@pytest.mark.ci
@launchd
async def test_a_bootstrap_is_repeated_while_the_old_job_exits(bench: Bench) -> None:
    await bench.services.install(bench.spec())
    (bench.tools / "bootstrap-codes").write_text("5 37")
    await bench.services.start("nodeagent")
    assert (await bench.services.state("nodeagent")).pid is not None
    assert len(calls(bench, "bootstrap")) == 2 + 2  # two jobs, two refusals


@launchd
@pytest.mark.full
@pytest.mark.parametrize(
    ("codes", "match", "attempts"),
    [
        ("5 5 5 5 5", "an earlier job with this label has not ended", 5),
        ("37 37 37 37 37", "still working on this job", 5),
        ("125", "install the service without --user", 1),
        ("133", "launchd answered 133", 1),
    ],
)
async def test_each_refusal_has_a_sentence(
    bench: Bench, codes: str, match: str, attempts: int
) -> None:
    if attempts > 1 and codes.startswith("37"):
        codes = "37 5 37 5 37"
    services = LaunchdServices(bench.definitions, _ImpatientClock())
    await services.install(bench.spec())
    (bench.tools / "bootstrap-codes").write_text(codes)
    with pytest.raises(ServiceError, match=match):
        await services.start("nodeagent")
    assert len(calls(bench, "bootstrap")) == attempts


class _ImpatientClock(SystemClock):
    """A clock on which every wait is short."""

    @override
    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.01))


@launchd
async def test_an_agent_of_a_user_without_a_screen_session_is_refused(bench: Bench) -> None:
    services = LaunchdServices(bench.definitions, SystemClock(), is_user=True)
    await services.install(bench.spec())
    with pytest.raises(ServiceError, match="logged in at the screen, and SSH is not enough"):
        await services.start("nodeagent")


@pytest.mark.ci
@launchd
async def test_stop_waits_until_the_program_has_ended(bench: Bench) -> None:
    await bench.services.install(bench.spec())
    await bench.services.start("nodeagent")
    await bench.services.stop("nodeagent")
    # The stand-in shows a job while it ends, and refuses it for a while after that.
    assert len(calls(bench, "print")) > 4
    await bench.services.start("nodeagent")
    assert (await bench.services.state("nodeagent")).pid is not None


@launchd
async def test_nothing_is_linted_without_plutil(bench: Bench) -> None:
    assert (shutil.which("plutil") is None) == (sys.platform != "darwin")
    await bench.services.install(bench.spec())
