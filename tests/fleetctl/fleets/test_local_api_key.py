"""The API key of fleetctl on the machine of `fleetctl up --join`: made once, kept in the data folder, used without a flag."""

import stat
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fleetctl.cli.connect import gateway_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.api_keys import secret_of
from fleetctl.fleets.data_dir import DataDir
from fleetctl.fleets.gateways import read_api_key
from fleetctl.fleets.local_api_key import NAME, ensure_api_key
from machinery.clock import SystemClock
from schemas.records import ApiKey
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete

PLACE = keys.named(keys.API_KEY_PREFIX, NAME)


@click.command()
@gateway_options
def shown(**options: Any) -> None:
    click.echo(read_api_key(options))


def key_of(data_dir: DataDir, *words: str, **variables: str) -> str:
    """Return the key that a command with these flags uses."""
    config = {"FLEETCTL_CONFIG": str(data_dir.path / "no-config.toml")}
    flags = ["--data-dir", str(data_dir.path), *words]
    done = CliRunner().invoke(shown, flags, env={**config, **variables})
    assert done.exit_code == 0, done.output
    return done.output.strip()


async def test_the_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    store, data_dir, clock = MemoryTransport(SystemClock()), DataDir(tmp_path), SystemClock()
    await ensure_api_key(store, data_dir, clock)
    first = data_dir.api_key.read_text().strip()
    revision = (await store.list(keys.API_KEY_PREFIX)).revision
    await ensure_api_key(store, data_dir, clock)
    assert (await store.list(keys.API_KEY_PREFIX)).revision == revision
    item = await store.get(PLACE)
    assert item is not None
    record = codec.decode(ApiKey, item)
    assert (record.role, record.hash) == ("admin", secret_of(first).hash)
    assert first.encode() not in item.value
    assert stat.S_IMODE(data_dir.api_key.stat().st_mode) == 0o600
    assert key_of(data_dir) == first


async def test_an_interrupted_start_is_continued(tmp_path: Path) -> None:
    store, data_dir, clock = MemoryTransport(SystemClock()), DataDir(tmp_path), SystemClock()
    await ensure_api_key(store, data_dir, clock)
    first = data_dir.api_key.read_text()
    await store.commit([], [Delete(key=PLACE)])
    await ensure_api_key(store, data_dir, clock)
    assert data_dir.api_key.read_text() == first
    data_dir.api_key.unlink()
    await ensure_api_key(store, data_dir, clock)
    item = await store.get(PLACE)
    assert item is not None
    assert codec.decode(ApiKey, item).hash == secret_of(key_of(data_dir)).hash


async def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path)
    data_dir.passwords.mkdir(mode=0o700)
    data_dir.api_key.write_text("sk-fleet-x")
    data_dir.api_key.chmod(0o644)
    with pytest.raises(FleetctlError, match=r"api-key cannot be used: .* Delete it"):
        await ensure_api_key(MemoryTransport(SystemClock()), data_dir, SystemClock())


async def test_other_keys_come_first_and_other_gateways_never_get_it(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path)
    await ensure_api_key(MemoryTransport(SystemClock()), data_dir, SystemClock())
    assert key_of(data_dir, "--gateway", "https://elsewhere:4000") == ""
    assert key_of(data_dir, FLEET_API_KEY="sk-fleet-mine") == "sk-fleet-mine"
