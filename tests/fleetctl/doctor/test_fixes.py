"""`doctor --fix`: lists and asks first, does what is safe, and looks again; on real files and a real etcd."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetctl.doctor import fixes
from fleetctl.doctor.fixes import FIXES, FixContext, FixResult
from insight.doctor.findings import Finding
from machinery.clock import SystemClock
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.grpc.admin import MaintenanceClient
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Put
from tests.support.etcd import running_etcd
from tests.support.fleet import Done
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl
from tests.support.waiting import until_async

NOWHERE = EtcdAddress(endpoints=("http://127.0.0.1:1",))


def finding(fix: str, node: str = "") -> Finding:
    return Finding(check="c", level="WARN", message="m", advice="a", fix=fix, node=node)


async def fixed(name: str, data_dir: Path | None, address: EtcdAddress = NOWHERE) -> FixResult:
    (fix,) = (one for one in FIXES if one.name == name)
    return await fixes.run_fix(
        fix, FixContext(address=address, data_dir=data_dir, clock=SystemClock())
    )


def leftover(data_dir: Path) -> Path:
    """Return a file of an interrupted download in the models folder of a fleet in that data folder."""
    models = data_dir / "models"
    models.mkdir(parents=True)
    (data_dir / "run").mkdir()
    record = {"pid": 7, "start": "x", "command": ["agent", "--models-dir", str(models)]}
    (data_dir / "run" / "mac-1.pid").write_text(json.dumps(record))
    path = models / "sha256-aa.part"
    path.write_bytes(b"x" * 1024)
    os.utime(path, (0, 0))
    return path


def open_secret(data_dir: Path) -> Path:
    path = data_dir / "authority" / "ca.key"
    path.parent.mkdir(parents=True)
    path.write_text("key")
    path.chmod(0o644)
    return path


def test_each_known_remedy_is_planned_once_and_not_for_other_machines() -> None:
    findings = [finding("partial-files"), finding("partial-files"), finding("power"), finding("")]
    assert [fix.name for fix in fixes.plan_fixes(findings)] == ["partial-files"]
    assert fixes.plan_fixes([finding("partial-files", node="mac-2")]) == ()


async def test_a_second_run_finds_nothing_left_to_do(tmp_path: Path) -> None:
    part, key = leftover(tmp_path), open_secret(tmp_path)
    first = [await fixed("partial-files", tmp_path), await fixed("open-files", tmp_path)]
    assert [result.message for result in first] == [
        "deleted 1 file with 1.0 KiB",
        f"set the mode 0600 of {key}",
    ]
    assert not part.exists()
    assert key.stat().st_mode & 0o777 == 0o600
    for name in ("partial-files", "open-files"):
        again = await fixed(name, tmp_path)
        assert (again.is_done, again.message) == (True, "nothing was left to do")


async def test_a_remedy_that_fails_is_told() -> None:
    result = await fixed("etcd-space", None)
    assert not result.is_done
    assert result.message


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EmbeddedEtcd]:
    async with running_etcd(tmp_path / "etcd") as running:
        yield running


@pytest.mark.etcd
@pytest.mark.timeout(120)
async def test_the_history_of_etcd_is_dropped_and_no_key_is_lost(etcd: EmbeddedEtcd) -> None:
    store, client = connect(etcd.address), MaintenanceClient(etcd.address)
    for number in range(1_300):
        value = b"x" * (50_000 if number < 300 else 10)
        await store.commit([], [Put(key="/mlx-fleet/v1/k", value=value)])
    result = await fixed("etcd-space", None, etcd.address)
    assert result.is_done, result.message

    async def is_smaller() -> bool:
        # etcd counts pages as free from its next write on.
        await store.commit([], [Put(key="/mlx-fleet/v1/other", value=b"y")])
        return (await client.status()).db_size_in_use_bytes < 300 * 50_000 / 2

    await until_async(is_smaller, what="room in etcd's file", limit_s=60)
    item = await store.get("/mlx-fleet/v1/k")
    assert item is not None
    assert item.value == b"x" * 10
    await client.close()
    await store.close()


@pytest.mark.etcd
@pytest.mark.timeout(120)
async def test_the_verb_lists_asks_fixes_and_checks_again(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    part, key = leftover(tmp_path), open_secret(tmp_path)

    async def doctor(*words: str, stdin: bytes = b"") -> Done:
        return await run_fleetctl("doctor", "--data-dir", str(tmp_path), *words, stdin=stdin)

    plain = await doctor()
    assert (part.exists(), "1 file of interrupted downloads" in plain.out) == (True, True)

    no = await doctor("--fix", stdin=b"n\n")
    assert part.exists()
    assert "partial-files: delete files of interrupted downloads" in no.err
    assert "Do this now? [y/N]" in no.err

    yes = await doctor("--fix", "--yes", "-o", "json")
    tree = json.loads(yes.out)
    assert [(one["fix"], one["isDone"]) for one in tree["fixes"]] == [
        ("open-files", True),
        ("partial-files", True),
    ]
    assert not any(one.get("fix") for one in tree["findings"])
    assert not part.exists()
    assert key.stat().st_mode & 0o777 == 0o600

    again = await doctor("--fix", "--yes")
    assert again.out.startswith("Nothing here can be fixed automatically.")


async def test_a_fleet_without_a_fixable_problem(fleet: MemoryFleet) -> None:
    done = await fleet.ctl("doctor", "--fix")
    assert done.out.startswith("Nothing here can be fixed automatically.")
