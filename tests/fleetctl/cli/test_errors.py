"""Invalid input: a clear message, the right exit code, and nothing written."""

import os
import signal
from pathlib import Path

import pytest

from fleetctl.cli.errors import from_store_error
from store.errors import PermissionDeniedError
from tests.support.fleet import Fleet, fleetctl


@pytest.mark.timeout(180)
async def test_a_manifest_of_a_hundred_megabytes_is_refused_quickly(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    done = await fleetctl("apply", "-f", str(path), "--etcd", "unix:/nowhere")
    assert done.code == 1
    assert "huge.yaml" in done.err
    assert "104,857,600 bytes; the limit is 4,194,304 bytes" in done.err


@pytest.mark.timeout(180)
async def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    for name in ("missing.yaml", "empty", "loop.yaml"):
        done = await fleetctl("apply", "-f", str(tmp_path / name), "--etcd", "unix:/nowhere")
        assert done.code == 1
        assert name in done.err
        assert done.err.count("\n") < 5


@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_etcd_that_does_not_answer(store: Fleet) -> None:
    pid = store.etcd.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        done = await store.ctl("get", "nodes", limit_s=20)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.code == 1
    assert "no answer" in done.err


def test_a_denial_says_how_to_become_an_administrator() -> None:
    """Fleets of `up --join` give identities, fleets with an etcd of their own have users."""
    told = str(from_store_error(PermissionDeniedError("etcd denies this")))
    assert "`fleetctl token create --role admin`" in told
    assert "`fleetctl init-auth`" in told
