"""Backup and restore in a shared etcd with passwords: permissions, and the data of other users."""

from pathlib import Path

import pytest

from store import keys
from store.etcd.connect import connect
from store.namespace import with_prefix
from store.port import Put
from tests.support.fleet import fleetctl
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.store_guarded_etcd import guarded_etcd


@pytest.mark.ci
@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_the_admin_backs_up_and_root_restores(tmp_path: Path) -> None:
    file, key = str(tmp_path / "fleet.backup"), keys.spec_key("NodePool", "pool")
    async with guarded_etcd(tmp_path, prefix="/lab") as etcd:
        root = connect(etcd.address("root"))
        await root.commit([], [Put(key=f"/lab{key}", value=b"{}"), Put(key=key, value=b"theirs")])

        def flags(who: str, prefix: str) -> tuple[str, ...]:
            password = ("--etcd-password-file", str(etcd.file(who)))
            return ("--etcd", etcd.etcd.url, *password, "--etcd-prefix", prefix)

        saved = await fleetctl("backup", file, *flags("admin", "/lab"))
        assert saved.code == 0, saved.err
        assert "1 keys as of revision" in saved.out
        gateway = await fleetctl("backup", file, "--force", *flags("gateway", "/lab"))
        assert (gateway.code, "permission denied" in gateway.err) == (1, True)
        denied = await fleetctl("restore", file, "--force", *flags("admin", "/lab"))
        assert (denied.code, "permission denied" in denied.err) == (1, True)
        snapshot = await fleetctl(
            "backup", "--etcd-snapshot", str(tmp_path / "s"), *flags("admin", "/lab")
        )
        assert (snapshot.code, "permission denied" in snapshot.err) == (1, True)
        assert not (tmp_path / "s").exists()
        done = await fleetctl("restore", file, *flags("root", "/moved"))
        assert done.code == 0, done.err
        item = await with_prefix(root, "/moved").get(key)
        assert item is not None
        assert item.value == b"{}"
        theirs = await root.get(key)
        assert theirs is not None
        assert theirs.value == b"theirs"
        await root.close()


async def test_a_restore_does_not_guess_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fleetctl down`, which comes before it, leaves the context of its fleet."""
    file, config, folder = tmp_path / "fleet.backup", tmp_path / "config.toml", tmp_path / "fleet"
    monkeypatch.delenv("FLEET_DATA_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    file.touch()
    folder.mkdir()
    config.write_text(f'[contexts.lab]\ndata-dir = "{folder}"\n')
    words = ("restore", str(file))
    guess = await run_fleetctl("--config", str(config), *words)
    assert guess.code == 2
    assert f"{folder}. Give --data-dir" in guess.err
    for named in (
        ("--config", str(config), "--context", "lab", *words),
        ("--config", str(config), *words, "--context", "lab"),
        ("--config", str(config), *words, "--data-dir", str(tmp_path / "new")),
    ):
        done = await run_fleetctl(*named)
        assert done.code == 1
        assert str(file) in done.err  # an empty file is no backup
