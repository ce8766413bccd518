"""External endpoints in fleetctl: create externalkey, get endpoints, describe, and manifests."""

from pathlib import Path

from schemas.records import ExternalKey
from store import codec, keys
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.foreign_servers import route_with

CREATE = ("create", "externalkey", "cloud")
URL = ("--url", "https://api.example.com/v1")


async def test_a_key_is_stored_for_one_server_and_never_shown() -> None:
    fleet = MemoryFleet()
    done = await fleet.ctl(*CREATE, *URL, "--token-file", "-", stdin=b"sk-secret\n")
    assert (done.code, done.out) == (
        0,
        "externalkey/cloud stored for https://api.example.com:443\n",
    )
    item = await fleet.store.get(keys.named(keys.EXTERNAL_KEY_PREFIX, "cloud"))
    assert item is not None
    stored = codec.decode(ExternalKey, item)
    assert stored.key.get_secret_value() == "sk-secret"
    assert "sk-secret" not in repr(stored) + done.out + done.err
    gone = await fleet.ctl(*CREATE, "--remove")
    assert (gone.code, gone.out) == (0, "externalkey/cloud deleted\n")
    assert "there is no externalkey cloud" in (await fleet.ctl(*CREATE, "--remove")).err


async def test_what_is_missing_is_named(tmp_path: Path) -> None:
    fleet = MemoryFleet()
    assert "give --token-file FILE" in (await fleet.ctl(*CREATE, *URL)).err
    words = (*CREATE, "--token-file", "-")
    assert "give --url" in (await fleet.ctl(*words, stdin=b"sk")).err
    wrong = await fleet.ctl(*words, "--url", "example.com", stdin=b"sk")
    assert "expected an address such as https://api.example.com/v1" in wrong.err
    file = tmp_path / "key"
    file.write_text("sk-secret")
    file.chmod(0o644)
    done = await fleet.ctl(*CREATE, *URL, "--token-file", str(file))
    assert done.code == 1
    assert "sk-secret" not in done.err


async def test_external_endpoints_are_listed_with_the_fleets() -> None:
    fleet = MemoryFleet()
    external = {"url": "https://api.example.com/v1", "model": "big", "key": "cloud"}
    await fleet.store.commit([], [codec.put_spec(route_with(external))])
    done = await fleet.ctl("get", "endpoints")
    assert [line.split() for line in done.out.splitlines()] == [
        ["NAME", "NODE", "URL", "SERVED", "NAMES"],
        ["chat/outside", "api.example.com", "https://api.example.com/v1", "chat"],
    ]
    assert "external/outside=1" in (await fleet.ctl("get", "modelroutes")).out
    shown = (await fleet.ctl("describe", "mr/chat")).out
    assert "External endpoints" in shown
    assert ["outside", "https://api.example.com/v1", "big", "cloud"] in [
        line.split() for line in shown.splitlines()
    ]
