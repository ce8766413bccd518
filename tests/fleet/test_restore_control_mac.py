"""The control Mac is lost: a backup on a bare Mac gives a fleet, and the other Mac comes back with its certificate."""

import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.two_macs import MARKS, SPREAD, Mac, joined, registered, start_agent, two_macs
from tests.support.waiting import until

pytestmark = [*MARKS, pytest.mark.mlx, pytest.mark.timeout(420)]


@pytest.fixture
async def macs(tmp_path: Path, models_dir: Path) -> AsyncIterator[tuple[Mac, Mac]]:
    async with two_macs(tmp_path, models_dir) as made:
        yield made


async def lose(mac: Mac, pids: list[int]) -> None:
    """Kill everything that the machine runs, its supervisor first."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await mac.run("down", "--data-dir", str(mac.data))


async def test_a_backup_on_a_bare_mac_brings_the_fleet_back(
    macs: tuple[Mac, Mac], tmp_path: Path
) -> None:
    first, second = macs
    assert "fleet ready" in await first.up()
    await joined(first, second)
    await first.ok("apply", "-f", "-", stdin=SPREAD)
    await first.ok("wait", "md/tiny", "--for=condition=Available", "--timeout=120s")
    passphrase = tmp_path / "passphrase"
    passphrase.touch(mode=0o600)
    passphrase.write_text("a passphrase that nobody guesses")
    backup = tmp_path / "fleet.backup"
    sealed = ("--passphrase-file", str(passphrase))
    await first.ok("backup", str(backup), "--with-ca", *sealed)
    assert b"PRIVATE KEY" not in backup.read_bytes()
    await lose(first, [first.supervisor()])

    # Another disk: the same machine without its home folder.
    bare = Mac(tmp_path / "bare", first.address, first.prefix, first.models, port=first.port)
    bare.root.mkdir()
    try:
        restored = await bare.ok("restore", str(backup), *sealed)
        assert "restored the fleet's authority" in restored
        assert "fleet ready" in await bare.up()
        assert "tiny" in await bare.ok("get", "md")
        await it_comes_back(bare, second)
        await bare.ok("wait", "md/tiny", "--for=condition=Available", "--timeout=120s")
        said = await bare.ok("chat", "tiny", "-m", "x", "--max-tokens", "4")
        assert said.endswith("\n")
    finally:
        await bare.stop()


async def it_comes_back(control: Mac, other: Mac) -> None:
    """Let the other Mac join again without a token, and start its agent anew."""
    identity = ("--identity-dir", str(other.root / "mac-2" / "identity"))
    done = await other.run("join", f"{control.address}:4002", *identity)
    assert done.code == 0, done.err + control.last_words()
    assert "node/mac-2 joined again with its certificate" in done.out
    found = re.search(r"start it with: fleet-nodeagent (.*)", done.out)
    assert found is not None, done.out
    other.kill("mac-2")
    await until(lambda: not other.children["mac-2"].running())
    start_agent(other, "mac-2", found[1])
    await registered(control, "mac-2")
