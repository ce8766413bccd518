"""API keys in `fleetctl create`, `get`, `describe` and `delete`: output for scripts, and secrets that are shown once."""

import hashlib
import json
from datetime import UTC, datetime, timedelta

import click
import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import api_keys
from fleetctl.verbs.create_apikey import name_warnings, parse_expiry
from fleetctl.verbs.rotate import rotated
from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
from schemas.meta import ObjectMeta
from schemas.records import ApiKey, GatewayLease, PreviousSecret
from schemas.route import Backend, ModelRoute, ModelRouteSpec
from store import codec, keys
from store.backup import is_backed_up
from store.memory import MemoryTransport
from store.port import KeyValue, Put, Transport
from tests.support.fleetctl_runner import MemoryFleet

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)


async def stored(transport: Transport, name: str) -> ApiKey | None:
    item = await transport.get(keys.named(keys.API_KEY_PREFIX, name))
    return None if item is None else codec.decode(ApiKey, item)


async def test_a_key_is_printed_once_and_kept_as_a_hash(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "9000", "--concurrency", "4")
    names = ("--model", "fast", "--model", "qwen/best")
    made = await shared_fleet.ctl("create", "apikey", "ci", *names, *limits, "--expires", "30d")
    assert made.code == 0
    secret = made.out.removesuffix("\n")
    assert secret.startswith("sk-fleet-")
    assert len(secret) == 52
    assert made.err.splitlines() == [
        "warning: no deployment or route serves the name fast yet.",
        "warning: no deployment or route serves the name qwen/best yet.",
        "apikey/ci created. The key is shown only once:",
    ]
    key = await stored(shared_transport, "ci")
    assert key is not None
    assert key.hash == hashlib.sha256(secret.encode()).hexdigest()
    assert (key.models, key.role) == (("fast", "qwen/best"), "user")
    assert (key.requests_per_minute, key.tokens_per_minute, key.concurrency) == (60, 9000, 4)
    assert key.expires is not None
    assert key.expires - key.created == timedelta(days=30)

    again = await shared_fleet.ctl("create", "apikey", "ci")
    assert (again.code, again.out) == (1, "")
    assert "apikey/ci already exists" in again.err
    assert "fleetctl delete apikey ci" in again.err
    assert await stored(shared_transport, "ci") == key

    shown = [
        await shared_fleet.ctl(*words)
        for words in (
            ("get", "apikeys"),
            ("get", "apikeys", "-o", "yaml"),
            ("get", "apikey/ci", "-o", "json"),
            ("describe", "apikey", "ci"),
        )
    ]
    for done in shown:
        assert done.code == 0
        assert secret not in done.out
        assert key.hash not in done.out
    table, _, tree, told = shown
    titles = table.out.splitlines()[0]
    row = next(line for line in table.out.splitlines() if line.startswith("ci "))
    assert titles.split("  ")[0] == "NAME"
    assert row.split()[:5] == ["ci", "fast,qwen/best", "60", "9000", "4"]
    assert row.split()[-2] == "in"
    assert json.loads(tree.out)["spec"]["requestsPerMinute"] == 60
    assert "60 per minute" in told.out
    named = await shared_fleet.ctl("get", "apikeys", "-o", "name")
    assert "apikey/ci\n" in named.out


async def test_a_rotated_key_has_a_new_secret_and_the_old_one_for_an_overlap(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await shared_fleet.ctl("create", "apikey", "turn", "--concurrency", "4")
    before = await stored(shared_transport, "turn")
    assert before is not None
    done = await shared_fleet.ctl("rotate", "apikey", "turn")
    assert done.code == 0, done.err
    secret = done.out.removesuffix("\n")
    assert done.err.startswith("apikey/turn rotated. The earlier secret is valid until 2")
    now = await stored(shared_transport, "turn")
    assert now is not None
    assert now.hash == hashlib.sha256(secret.encode()).hexdigest()
    assert [previous_secret.hash for previous_secret in now.previous] == [before.hash]
    assert timedelta(hours=23) < now.previous[0].expires - SystemClock().now() <= timedelta(days=1)
    assert now.model_copy(update={"hash": before.hash, "previous": ()}) == before
    table = (await shared_fleet.ctl("get", "apikey", "turn")).out.splitlines()
    assert "EARLIER SECRET" in table[0]
    assert table[1].split()[-2:] == ["for", "24h"]
    told = (await shared_fleet.ctl("describe", "apikey", "turn")).out
    assert "valid until" in told
    tree = await shared_fleet.ctl("get", "apikey", "turn", "-o", "yaml")
    for shown in (told, tree.out):
        assert before.hash not in shown
        assert now.hash not in shown

    ended = await shared_fleet.ctl("rotate", "apikey/turn", "--end-overlap")
    assert (ended.code, ended.out) == (0, "apikey/turn: 1 earlier secret ended\n")
    assert await stored(shared_transport, "turn") == now.model_copy(update={"previous": ()})
    await shared_fleet.ctl("rotate", "apikey", "turn", "--overlap", "7d")
    at_once = await shared_fleet.ctl("rotate", "apikey", "turn", "--overlap", "0s")
    assert "Its earlier secrets are refused from now on." in at_once.err
    last = await stored(shared_transport, "turn")
    assert last is not None
    assert last.previous == ()
    assert last.hash == hashlib.sha256(at_once.out.strip().encode()).hexdigest()
    assert "EARLIER" in (await shared_fleet.ctl("get", "apikey", "turn")).out
    await shared_fleet.ctl("delete", "apikey", "turn")


def key_with(*ends: timedelta, **more: object) -> ApiKey:
    previous = tuple(
        PreviousSecret(hash=f"{n:064}", expires=NOW + end) for n, end in enumerate(ends)
    )
    return ApiKey(name="ci", hash="a" * 64, created=NOW, previous=previous, **more)  # type: ignore[arg-type]  # any field


def test_a_lost_new_secret_costs_the_clients_with_the_old_one_nothing() -> None:
    once = rotated(key_with(), "b" * 64, timedelta(hours=1), NOW)
    twice = rotated(once, "c" * 64, timedelta(hours=2), NOW)
    assert [(secret.hash[0], secret.expires - NOW) for secret in twice.previous] == [
        ("b", timedelta(hours=2)),
        ("a", timedelta(hours=1)),
    ]


def test_ended_secrets_make_room_and_others_are_not_ended_silently() -> None:
    hours = [timedelta(hours=n) for n in (3, 2, 1, -1)]
    assert len(rotated(key_with(*hours), "b" * 64, hours[0], NOW).previous) == 4
    with pytest.raises(FleetctlError, match=r"has 4 earlier secrets .* --end-overlap"):
        rotated(key_with(*hours[:3], timedelta(hours=4)), "b" * 64, hours[0], NOW)
    with pytest.raises(FleetctlError, match=r"apikey/ci expired on 2026-06-01 11:00 UTC"):
        rotated(key_with(expires=NOW - timedelta(hours=1)), "b" * 64, hours[0], NOW)


async def test_unserved_and_uncovered_model_names_are_warnings() -> None:
    transport = MemoryTransport(SystemClock())
    source = ModelSource(path="/m")
    spec = ModelDeploymentSpec(model=source, served_names=("standard",), replicas=0)
    deployment = ModelDeployment(metadata=ObjectMeta(name="qwen"), spec=spec)
    backends = (Backend(deployment="qwen"),)
    route = ModelRoute(
        metadata=ObjectMeta(name="r"), spec=ModelRouteSpec(model="smart", backends=backends)
    )
    await transport.commit([], [codec.put_spec(deployment), codec.put_spec(route)])
    assert await name_warnings(transport, ("qwen", "standard", "smart")) == []
    assert await name_warnings(transport, (), ("qwen", "standard")) == []
    assert await name_warnings(transport, ("qwen", "smart"), ("qwen",)) == []
    assert await name_warnings(transport, (), ("qwen",)) == [
        "warning: the limit of qwen does not cover the model's other names: standard. Limit them too, or name the "
        "models that the key may use with --model"
    ]
    assert await name_warnings(transport, ("standart", "nonono")) == [
        "warning: no deployment or route serves the name standart yet. Did you mean standard?",
        "warning: no deployment or route serves the name nonono yet.",
    ]


async def test_keys_that_no_gateway_requires_are_said_to_limit_nothing() -> None:
    memory = MemoryTransport(SystemClock())
    assert await api_keys.unrequired_note(memory) == "", "no gateway runs"
    for name, is_required in (("loopback", False), ("exposed", True)):
        lease = GatewayLease(
            url="http://127.0.0.1:4000", version="0.1.0", asks_for_keys=is_required
        )
        key = f"{keys.GATEWAY_LEASE_PREFIX}{name}"
        await memory.commit([], [Put(key=key, value=codec.encode(lease))])
        assert ("--auth on" in await api_keys.unrequired_note(memory)) is not is_required


def test_a_backup_holds_the_hashes() -> None:
    assert is_backed_up(KeyValue(keys.named(keys.API_KEY_PREFIX, "ci"), b"{}", 1, 1))


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("30d", datetime(2026, 7, 1, 12, tzinfo=UTC)),
        ("1h30m", datetime(2026, 6, 1, 13, 30, tzinfo=UTC)),
        ("2027-01-01", datetime(2027, 1, 1, tzinfo=UTC)),
        ("2027-01-01T12:00", datetime(2027, 1, 1, 12, tzinfo=UTC)),
        ("2027-01-01T12:00+02:00", datetime(2027, 1, 1, 10, tzinfo=UTC)),
    ],
)
def test_expiry_times(text: str, ends: datetime) -> None:
    assert parse_expiry(text, NOW) == ends


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-1d", "0d", "0s", "2026-06-01", "tomorrow", "2027-13-01", "1h1"]
)
def test_invalid_expiry_times_are_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match="--expires"):
        parse_expiry(text, NOW)
