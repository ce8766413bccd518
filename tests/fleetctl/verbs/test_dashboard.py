"""`fleetctl dashboard`: the address of a registered dashboard, one of this machine first, and its login link."""

import asyncio
import html
import json
import os
import re
import sys
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.verbs.dashboard import find_dashboard
from machinery.clock import SystemClock
from schemas.records import DashboardLease
from store import codec, keys
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Put
from tests.support.dashboards import running_dashboard
from tests.support.etcd import running_etcd
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.waiting import until, until_async

# In place of a browser: notes its argument and the file that it names.
BROWSER = """#!{python}
import json, os, pathlib, sys
page = pathlib.Path(sys.argv[1].removeprefix("file://"))
modes = [oct(one.stat().st_mode & 0o777) for one in (page, page.parent)]
new = pathlib.Path({note!r} + ".new")
new.write_text(json.dumps([sys.argv[1], page.read_text(), modes]))
new.rename({note!r})
"""


def lease(id_: str, url: str, *, asks_for_keys: bool = True) -> Put:
    key = keys.named(keys.DASHBOARD_LEASE_PREFIX, id_)
    value = DashboardLease(url=url, version="1", asks_for_keys=asks_for_keys)
    return Put(key=key, value=codec.encode(value))


async def test_the_dashboard_of_this_machine_comes_first() -> None:
    store = MemoryTransport(SystemClock())
    with pytest.raises(FleetctlError, match=r"no dashboard is registered.*fleetctl up"):
        await find_dashboard(store)
    await store.commit([], [lease("a", "")])
    with pytest.raises(FleetctlError, match=r"dashboard a is registered.*port"):
        await find_dashboard(store)
    await store.commit([], [lease("a", "http://10.0.0.5:4003")])
    assert await find_dashboard(store) == "http://10.0.0.5:4003"
    await store.commit([], [lease("b", "http://127.0.0.1:4003")])
    assert await find_dashboard(store) == "http://127.0.0.1:4003"


async def test_a_link_is_printed_only_if_a_login_is_needed() -> None:
    fleet = MemoryFleet()
    await fleet.store.commit([], [lease("a", "http://10.0.0.5:4003")])
    done = await fleet.ctl("dashboard", "--url")
    assert done.out == "http://10.0.0.5:4003\n"
    assert not (await fleet.store.list(keys.TICKET_PREFIX)).items
    done = await fleet.ctl("dashboard", "--link")
    assert re.fullmatch(r"http://10\.0\.0\.5:4003/#login=[0-9a-f]{16}\.[\w-]{43}\n", done.out)
    (ticket,) = (await fleet.store.list(keys.ticket_prefix("Dashboard/a"))).items
    assert done.out.strip().rpartition(".")[2] not in str(ticket.value)
    done = await fleet.ctl("dashboard", "--link", "--url")
    assert (done.code, "exclude each other" in done.err) == (2, True)
    await fleet.store.commit([], [lease("a", "http://10.0.0.5:4003", asks_for_keys=False)])
    done = await fleet.ctl("dashboard", "--link")
    assert done.out == "http://10.0.0.5:4003\n"


@pytest.mark.ci
@pytest.mark.etcd
async def test_a_browser_is_opened_logged_in_and_sees_no_secret_among_its_arguments(
    tmp_path: Path,
) -> None:
    note, browser = tmp_path / "note.json", tmp_path / "browser"
    browser.write_text(BROWSER.format(python=sys.executable, note=str(note)))
    browser.chmod(0o755)
    async with running_etcd(tmp_path / "etcd") as etcd:
        store = connect(etcd.address)
        async with running_dashboard(store, asks_for_keys=True) as running:
            await until(lambda: running.url, what="its address")

            async def is_registered() -> bool:
                return bool((await store.list(keys.DASHBOARD_LEASE_PREFIX)).items)

            await until_async(is_registered, limit_s=60)
            words = ("-m", "fleetctl", "dashboard", "--etcd", str(etcd.address))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *words),
                env={**os.environ, "DISPLAY": ":9", "BROWSER": str(browser)},
                stdout=asyncio.subprocess.PIPE,
            )
            await until(note.exists, limit_s=60, what="the browser")
            argument, page, modes = json.loads(note.read_text())
            assert "login" not in argument.rpartition("/")[0]
            assert "#" not in argument
            assert modes[1] == "0o700"
            link = html.unescape(re.findall(r"url=([^\"]+)", page)[0])
            assert link.startswith(f"{running.url}/#login=")
            ticket = {"ticket": link.partition("#login=")[2]}
            assert (await running.post("/login", ticket))["role"] == "admin"
            out, _ = await process.communicate()
            assert out.decode().splitlines() == [running.url, "logged in"]
            assert process.returncode == 0
            assert not Path(argument.removeprefix("file://")).exists()
        await store.close()
