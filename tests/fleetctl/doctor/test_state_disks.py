"""Disks to which gateways and dashboards write, full for real: each on a file system of its own."""

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from insight import process_client
from store.port import Transport
from tests.support.fleet import Fleet, fleetctl
from tests.support.ports import free_port
from tests.support.waiting import until_async

_UNSHARE = ("unshare", "--map-root-user", "--mount")


def _can_mount() -> bool:
    try:
        return subprocess.run((*_UNSHARE, "true"), capture_output=True, check=False).returncode == 0
    except OSError:
        return False


async def _start(stack: AsyncExitStack, folder: Path, mib: int, *words: str) -> None:
    """Start a process whose state folder has a disk of 64 MiB, with so many that are used."""
    folder.mkdir()
    script = f'mount -t tmpfs -o size=64m,mode=0700 tmpfs "$0" && head -c {mib}m /dev/zero > "$0/used" && exec "$@"'
    flags = (*words, "--port", str(free_port()), "--state-dir", str(folder))
    child = await asyncio.create_subprocess_exec(
        *(*_UNSHARE, "sh", "-c", script, str(folder), sys.executable, "-m", *flags),
        stderr=subprocess.DEVNULL,
    )

    async def end() -> None:
        child.kill()
        await child.wait()

    stack.push_async_callback(end)


@pytest.mark.ci
@pytest.mark.skipif(not _can_mount(), reason="needs mount namespaces of users")
async def test_doctor_names_the_full_disks_of_gateways_and_dashboards(
    shared: Fleet, transport: Transport, tmp_path: Path
) -> None:
    etcd = ("--etcd", str(shared.etcd.address))
    async with AsyncExitStack() as stack:
        for mib in (1, 60):
            await _start(stack, tmp_path / f"gateway{mib}", mib, "gateway", *etcd)
            await _start(stack, tmp_path / f"dashboard{mib}", mib, "dashboard", *etcd)

        async def full() -> list[str]:
            gateways = await process_client.list_gateway_leases(transport)
            dashboards = await process_client.list_dashboard_leases(transport)
            found = [gateway.full_disk for gateway in gateways.values()]
            return sorted(found + [dashboard.full_disk for dashboard in dashboards.values()])

        expected = ["", "", str(tmp_path / "dashboard60"), str(tmp_path / "gateway60")]

        async def is_told() -> bool:
            return await full() == expected

        await until_async(is_told, what="the full disks in the registrations")
        done = await fleetctl("doctor", *etcd)
        for name in ("gateway", "dashboard"):
            assert (
                f"the disk of {tmp_path}/{name}60, where it writes its state, is almost full"
                in (" ".join(done.out.split()))
            )
        assert done.code == 1
        assert "gateway1," not in done.out
