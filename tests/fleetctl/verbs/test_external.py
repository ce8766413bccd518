"""External endpoints in fleetctl: the keys of servers outside the fleet. What is printed: tests/golden/hub.txt."""

from pathlib import Path

from schemas.records import ExternalKey
from store import codec, keys
from tests.support.fleetctl_runner import MemoryFleet

CREATE = ("create", "externalkey", "cloud", "--url", "https://api.example.com/v1")


async def test_a_key_is_stored_for_one_server_and_never_shown(tmp_path: Path) -> None:
    fleet = MemoryFleet()
    done = await fleet.ctl(*CREATE, "--token-file", "-", stdin=b"sk-secret\n")
    assert done.code == 0
    item = await fleet.store.get(keys.named(keys.EXTERNAL_KEY_PREFIX, "cloud"))
    assert item is not None
    stored = codec.decode(ExternalKey, item)
    assert stored.key.get_secret_value() == "sk-secret"
    file = tmp_path / "key"
    file.write_text("sk-secret")
    file.chmod(0o644)
    refused = await fleet.ctl(*CREATE, "--token-file", str(file))
    assert refused.code == 1
    assert "sk-secret" not in repr(stored) + done.out + done.err + refused.err
