"""The first ten minutes of a newcomer with two Macs: install, up, install, join, run; five commands to a streamed answer.

Each Mac is a network namespace with a home folder of its own and nothing of this checkout: the programs come from the
archive that `fleetctl bundle create` makes, and the model from a hub at the other end of the network.
"""

import asyncio
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from machinery.clock import SystemClock
from tests.support import netns
from tests.support.hub import StandInHub
from tests.support.models import MODEL
from tests.support.netns import Networks
from tests.support.release_wheels import PLATFORM, PYTHON, real_uv

ROOT = Path(__file__).parents[2]
REPO = f"mlx-community/{MODEL}"
AIM_S, AIM_COMMANDS = 180.0, 6

pytestmark = [
    pytest.mark.full,
    pytest.mark.fleet,
    pytest.mark.etcd,
    pytest.mark.mlx,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not netns.available(), reason="needs network namespaces"),
]


@dataclass
class Newcomer:
    """A person at the terminal of one Mac."""

    home: Path
    address: str
    prefix: tuple[str, ...]
    typed: list[str] = field(default_factory=list)

    def type(self, line: str, **variables: str) -> str:
        """Run a line in a shell on a terminal; return what it shows. It fails if the line does."""
        self.typed.append(line)
        own = {"HOME": str(self.home), "PATH": f"{self.home}/.local/bin:/usr/bin:/bin:/usr/sbin"}
        main, terminal = pty.openpty()
        process = subprocess.Popen(
            (*self.prefix, "sh", "-c", line),
            cwd=self.home,
            env={**own, **variables, "TERM": "dumb", "OPENBLAS_NUM_THREADS": "1"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        shown = _read(main, process)
        assert process.wait() == 0, f"$ {line}\n{shown}\n{self.logs()}"
        return shown

    def logs(self) -> str:
        """Return the ends of all logs on this Mac."""
        return "\n".join(
            f"{path}: {path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.home.rglob("*.log"))
        )

    def end(self) -> None:
        """End what still runs on this Mac."""
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("HOME", "").startswith(str(self.home)):
                process.kill()


def _read(main: int, process: subprocess.Popen[bytes]) -> str:
    """Return what is written to a terminal until the process has ended; its children may keep the terminal open."""
    shown = b""
    while True:
        is_over = process.poll() is not None
        if select.select([main], [], [], 0.2)[0]:
            try:
                shown += os.read(main, 65536)
            except OSError:  # closed by all
                break
        elif is_over:
            break
    os.close(main)
    return shown.decode(errors="replace").replace("\r\n", "\n")


@pytest.fixture
def networks() -> Iterator[Networks]:
    with Networks(2).made() as made:
        yield made


@pytest.fixture
def macs(networks: Networks, short_folder: Path) -> Iterator[tuple[Newcomer, Newcomer]]:
    found = []
    for number in range(2):
        place = networks.place(number)
        home = short_folder / f"mac-{number + 1}"
        home.mkdir()
        found.append(Newcomer(home, place.client_host, tuple(place.prefix)))
    try:
        yield found[0], found[1]
    finally:
        for mac in found:
            mac.end()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the archive with all packages that a newcomer copies to both Macs."""
    folder = tmp_path_factory.mktemp("release")
    environment = {**os.environ, "UV_SYSTEM_CERTS": "1"}
    build = (ROOT / "packaging" / "build.sh", folder / "dist", sys.executable, real_uv())
    subprocess.run(build, check=True, env=environment, timeout=300)
    out = folder / "mlx-fleet.tar"
    wheel = next((folder / "dist").glob("*.whl"))
    subprocess.run(
        [
            *(sys.executable, "-m", "fleetctl", "bundle", "create", "--wheel", wheel, "--out", out),
            *("--platform", PLATFORM.name, "--python-version", PYTHON),
        ],
        check=True,
        timeout=300,
    )
    return out


@pytest.fixture
def hub(networks: Networks, smollm2: Path) -> Iterator[StandInHub]:
    """Yield a hub that both Macs reach, served by a thread: people at terminals block."""
    files = {path.name: path.read_bytes() for path in (smollm2 / MODEL).iterdir() if path.is_file()}
    found = StandInHub(host=networks.client_address(1), repos={REPO: files})
    begun, loop = threading.Event(), asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with found.serve():
            begun.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert begun.wait(30)
        yield found
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def test_two_macs_answer_after_five_commands(
    macs: tuple[Newcomer, Newcomer], archive: Path, hub: StandInHub
) -> None:
    first, second = macs
    for mac in macs:
        with tarfile.open(archive) as files:
            files.extractall(mac.home, filter="data")
    python = getattr(sys, "_base_executable", sys.executable)
    # As root, the default prefix is the one of the machine that runs the tests.
    folders = '--prefix "$HOME/programs" --link-dir "$HOME/.local/bin"'
    install = f"./mlx-fleet-*/install.sh {folders} --python {shlex.quote(str(python))}"
    clock = SystemClock()
    begin = clock.monotonic()

    first.type(install)
    # Newcomers type no endpoint: theirs is huggingface.co.
    shown = first.type(f"fleetctl up --join {first.address} --detach", HF_ENDPOINT=hub.endpoint)
    second.type(install)
    (join,) = re.findall(r"fleetctl join --service mf1\.\S+ \S+", shown)
    assert "joined the fleet" in second.type(join)
    answer = first.type(f"fleetctl run --temperature 0 {REPO} 'What is the capital of France?'")
    took = clock.monotonic() - begin

    assert "Paris" in answer
    assert len(first.typed) + len(second.typed) < AIM_COMMANDS
    print(f"two Macs answered after {took:.0f} s")
    assert took < AIM_S, f"{took:.0f} s, aim {AIM_S:.0f} s"
