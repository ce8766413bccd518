"""Service managers for tests, with stand-ins for launchctl and systemctl."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleetctl.services.launchd import LaunchdServices
from fleetctl.services.layout import BACKENDS, Backend
from fleetctl.services.port import Services, ServiceSpec
from fleetctl.services.systemd import SystemdServices
from machinery import processes
from machinery.clock import SystemClock
from tests.support import service_stand_ins

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A service manager and a program for it."""

    backend: Backend
    services: Services
    folder: Path
    definitions: Path
    tools: Path

    def spec(self, word: str = "first", **changed: object) -> ServiceSpec:
        values: dict[str, object] = {
            "name": "nodeagent",
            "command": (
                *(sys.executable, "-m", "tests.support.service_program", str(self.folder), word),
            ),
            "log": self.folder / "nodeagent.log",
            "working_folder": self.folder,
            "python": Path(sys.executable),
            "environment": (("PYTHONPATH", str(ROOT)), ("WITH", 'a "b" $c 100%')),
            "stop_timeout_s": 10,
        }
        return ServiceSpec(**{**values, **changed})  # type: ignore[arg-type]  # a table of fields

    @property
    def words(self) -> str:
        path = self.folder / "words"
        return path.read_text().rpartition(" ")[2] if path.exists() else ""

    @property
    def engine(self) -> int | None:
        child = processes.adopt(self.folder / "engine.pid")
        return child.record.pid if child is not None else None


@pytest.fixture(params=BACKENDS)
async def bench(
    request: pytest.FixtureRequest, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    definitions, tools, folder = (short_folder / name for name in ("defs", "state", "work"))
    definitions.mkdir()
    folder.mkdir()
    service_stand_ins.install_tools(short_folder / "bin", tools, definitions)
    monkeypatch.setenv("PATH", f"{short_folder / 'bin'}:{os.environ['PATH']}")
    clock = SystemClock()
    made: dict[str, Services] = {
        "launchd": LaunchdServices(definitions, clock),
        "systemd": SystemdServices(definitions),
    }
    found = Bench(
        backend=request.param,
        services=made[request.param],
        folder=folder,
        definitions=definitions,
        tools=tools,
    )
    yield found
    await found.services.remove("nodeagent")
    service_stand_ins.end_jobs(tools)
    if found.engine is not None:
        os.kill(found.engine, signal.SIGKILL)
