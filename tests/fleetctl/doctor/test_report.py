"""The findings of `fleetctl doctor` with a real store, and without one."""

import json

from tests.support.fleet import Fleet, fleetctl


async def test_an_empty_store_fails(shared: Fleet) -> None:
    done = await fleetctl("doctor", "--etcd", str(shared.etcd.address), "-o", "json")
    assert done.code == 1, done.err
    tree = json.loads(done.out)
    assert tree["ok"] is False
    levels = {(one["check"], one["level"]) for one in tree["findings"]}
    assert levels >= {("store", "OK"), ("leader", "FAIL"), ("nodes", "WARN"), ("gateways", "WARN")}


async def test_no_store() -> None:
    done = await fleetctl("doctor", "--etcd", "http://127.0.0.1:1")
    assert (done.code, done.err) == (1, "")
    assert done.out.startswith("FAIL  store  etcd at http://127.0.0.1:1: ")
    assert done.out.endswith("\n0 OK, 0 WARN, 1 FAIL\n")
