"""The first ten minutes of a newcomer with two Macs: install, up, install, join, run; five commands to a streamed answer.

Each Mac is a network namespace with a home folder of its own and nothing of this checkout: the programs come from the
archive that `fleetctl bundle create` makes, and the model from a hub at the other end of the network.
"""

import asyncio
import os
import re
import shlex
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from tests.support import netns
from tests.support.hub import StandInHub
from tests.support.models import MODEL
from tests.support.netns import Networks
from tests.support.newcomers import Newcomer
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
    stand_in_hub = StandInHub(host=networks.client_address(1), repos={REPO: files})
    begun, loop = threading.Event(), asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with stand_in_hub.serve():
            begun.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert begun.wait(30)
        yield stand_in_hub
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
