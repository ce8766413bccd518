"""Services of systemd, from their unit files and from recorded output of systemctl."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from fleetctl.services.systemd import service_unit
from nodeagent.doctor.host_facts import ServiceFacts, ServiceKind
from nodeagent.doctor.process_facts import read_units
from tests.support.clock import FakeClock
from tests.support.launchd_jobs import SPEC

NOW = FakeClock().now()
LOOPS = "LoadState=loaded\nMainPID=0\nNRestarts=41\nExecMainStatus=203\n"


async def units(root: Path, printed: str | None, unit: str, *, is_user: bool) -> ServiceFacts:
    """Return the only installed service; systemctl prints what was recorded."""
    folder = root / ("home/.config/systemd/user" if is_user else "etc/systemd/system")
    folder.mkdir(parents=True)
    (folder / "mlx-fleet-nodeagent.service").write_text(unit)
    (folder / "sshd.service").write_text("[Service]\n")

    async def run(argv: Sequence[str]) -> str | None:
        assert argv[-1] == "mlx-fleet-nodeagent.service"
        assert ("--user" in argv) == is_user
        return printed

    [service_facts] = await read_units(run, root, root / "home", NOW)
    return service_facts


@pytest.mark.parametrize("is_user", [False, True])
async def test_a_unit_that_runs(*, tmp_path: Path, is_user: bool) -> None:
    unit = service_unit(SPEC, is_user=is_user)
    printed = f"LoadState=loaded\nMainPID={os.getpid()}\nNRestarts=2\nExecMainStatus=0\n"
    facts = await units(tmp_path, printed, unit, is_user=is_user)
    assert (facts.name, facts.kind, facts.pid) == ("nodeagent", ServiceKind.SYSTEMD, os.getpid())
    assert (facts.restarts, facts.last_exit, facts.differences) == (2, None, ())
    assert facts.age_s is not None


async def test_a_unit_that_ends_again_and_again(tmp_path: Path) -> None:
    unit = service_unit(SPEC, is_user=False).replace("Restart=always", "Restart=on-failure")
    facts = await units(tmp_path, LOOPS, unit, is_user=False)
    assert (facts.pid, facts.restarts, facts.last_exit, facts.age_s) == (None, 41, 203, None)
    assert facts.differences == ("Restart is on-failure instead of always",)


async def test_a_systemd_that_does_not_answer_leaves_the_restarts_unknown(tmp_path: Path) -> None:
    facts = await units(tmp_path, None, service_unit(SPEC, is_user=False), is_user=False)
    assert (facts.pid, facts.restarts) == (None, None)
