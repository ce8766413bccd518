"""Logins at a dashboard that starts while etcd is away: with the keys of its folder, and without them."""

from datetime import timedelta
from operator import itemgetter
from pathlib import Path

import pytest

from gateway.state.persistence import GatewaySnapshot, KnownObjects, SnapshotFile
from store import keys
from store.errors import UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.port import Delete
from tests.support.dashboard_fleets import api_key, put_api_key
from tests.support.dashboards import CLOCK, running_dashboard
from tests.support.etcd import running_etcd
from tests.support.macs import mac
from tests.support.waiting import until, until_async

pytestmark = pytest.mark.etcd


async def test_saved_keys_open_a_dashboard_until_etcd_says_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    ann, bob = api_key("ann", "viewer", "sk-ann"), api_key("bob", "admin", "sk-bob")
    eve = api_key("eve", "admin", "sk-eve", life_s=-1)
    async with running_etcd(tmp_path / "etcd") as etcd:
        store = connect(etcd.address)
        await store.commit([], [*mac("mac-1"), *map(put_api_key, (ann, bob, eve))])
        async with running_dashboard(store, asks_for_keys=True, state_dir=folder) as first:
            headers = await first.log_in("sk-bob")
            path = "/api/v1/objects/Node/mac-1/changes"
            await first.until(path, itemgetter("changes"), headers=headers)
            file = folder / "known.json"
            await until(file.exists, what="the saved keys")
            await store.commit([], [Delete(key=keys.named(keys.API_KEY_PREFIX, "bob"))])
            await until(lambda: b"bob" not in file.read_bytes(), what="the deleted key to be gone")
            assert file.stat().st_mode & 0o777 == 0o600
            assert b"sk-ann" not in file.read_bytes()
        await etcd.supervisor.stop()
        async with running_dashboard(
            store, asks_for_keys=True, id_="run2", has_store=False, state_dir=folder
        ) as second:
            saved = second.dashboard
            await until(lambda: saved.known_keys() is not None, what="the saved keys in use")
            for wrong in ("sk-bob", "sk-eve", "sk-other"):
                await second.post("/login", {"key": wrong}, 401)
            headers = await second.log_in("sk-ann")
            found = await second.get("/api/v1/snapshot?view=macs", headers=headers)
            assert [one["name"] for one in found["views"]["macs"]] == ["mac-1"]
            await second.post("/api/v1/apply", {}, 403, headers=headers)
            # The key was revoked meanwhile: the store's word ends the session as soon as it is heard.
            await etcd.start()

            async def is_revoked() -> bool:
                try:
                    await store.commit([], [Delete(key=keys.named(keys.API_KEY_PREFIX, "ann"))])
                except UnavailableError:
                    return False
                return True

            await until_async(is_revoked, limit_s=60)
            await second.until("/api/v1/me", status=401, headers=headers)
            await until(lambda: b"ann" not in file.read_bytes(), what="the file without the key")
        await store.close()


@pytest.mark.parametrize("age_s", [None, 25 * 3600.0, -3600.0])
async def test_without_usable_keys_a_login_says_what_it_waits_for(
    tmp_path: Path, age_s: float | None
) -> None:
    """There is no file, it is older than the history, or it is of a time to come."""
    if age_s is not None:
        ann = api_key("ann", "viewer", "sk-ann")
        saved = GatewaySnapshot(
            saved_at=CLOCK.now() - timedelta(seconds=age_s), known=KnownObjects(), keys={"ann": ann}
        )
        SnapshotFile(tmp_path).save(saved)
    store = connect(EtcdAddress(socket=tmp_path / "nobody"))
    async with running_dashboard(
        store, asks_for_keys=True, has_store=False, state_dir=tmp_path
    ) as running:
        for pause_s in (0.0, 2.5):
            await CLOCK.sleep(pause_s)
            refused = await running.post("/login", {"key": "sk-ann"}, 503)
            assert "could not be read from etcd yet" in refused["error"]["message"]
            assert "when etcd answers" in refused["error"]["message"]
    await store.close()
