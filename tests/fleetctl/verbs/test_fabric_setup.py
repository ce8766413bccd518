"""`fleetctl fabric setup` with stand-ins for macOS's programs, on the ports of two Macs that others captured."""

import json
import os
import plistlib
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleetctl.services import link_plan
from fleetctl.services.changes import ChangeRecord
from fleetctl.verbs import fabric_setup
from fleetctl.verbs.service import installation_at
from tests.support import service_stand_ins
from tests.support.fleet import Done
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.golden import matches_golden
from tests.support.service_kills import World, difference, in_child

CAPTURES = Path(__file__).parents[2] / "nodeagent" / "hardware" / "captures" / "fabric"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network settings of a Mac need root")


@pytest.fixture
def mac(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the world changes it
    world = World(short_folder)
    service_stand_ins.plug_cables(world.state, CAPTURES / "book")
    return world


async def setup(mac: World, *words: str) -> Done:
    return await run_fleetctl("fabric", "setup", "--root", str(mac.root), *words)


def network(mac: World) -> dict[str, Any]:
    tree: dict[str, Any] = service_stand_ins.machine_of(mac.state)["network"]
    return tree


def change(mac: World, service: str, **values: object) -> None:
    machine = service_stand_ins.machine_of(mac.state)
    machine["network"]["services"].setdefault(service, {}).update(values)
    (mac.state / "machine.json").write_text(json.dumps(machine))


async def test_a_dry_run_shows_each_change_and_makes_none(
    mac: World, request: pytest.FixtureRequest
) -> None:
    before = mac.snapshot()
    done = await setup(mac, "--dry-run")
    text = re.sub(r"node: \S+,", "node: NAME,", done.out.replace(str(mac.root), "ROOT"))
    matches_golden(request, "worlds/fabric_setup", text)
    assert difference(before, mac.snapshot()) == []


async def test_a_mac_is_set_up_twice_and_undone(mac: World) -> None:
    before = mac.snapshot()
    done = await setup(mac)
    assert done.code == 0, done.err
    state = network(mac)
    assert (state["running"], state["stored"]) == ({}, {})
    services = state["services"]
    assert not services["Thunderbolt Bridge"]["on"]
    addresses = {name: (service["method"], service["address"], service["mask"]) for name, service in services.items() if name.startswith("mlx-fleet")}  # fmt: skip
    assert addresses == {
        "mlx-fleet Thunderbolt 1": ("DHCP", "", ""),
        "mlx-fleet Thunderbolt 2": ("Manual", "10.82.0.225", "255.255.255.252"),
        "mlx-fleet Thunderbolt 3": ("DHCP", "", ""),
    }
    path = mac.layout.definitions / "io.mlxfleet.fabric.plist"
    job = plistlib.loads(path.read_bytes())
    assert job["RunAtLoad"]
    # Root runs nothing at boot that a user can replace.
    programs = [line.split()[0] for line in job["ProgramArguments"][2].splitlines()]
    assert set(programs) <= {"/bin/sleep", "/sbin/ifconfig", "/usr/sbin/networksetup", "/usr/libexec/PlistBuddy"}  # fmt: skip
    again = await setup(mac)
    assert again.out.endswith("Nothing had to be changed.\n")
    assert network(mac) == state
    done = await run_fleetctl("service", "uninstall", "--root", str(mac.root))
    assert "fabric uninstalled" in done.out
    assert difference(before, mac.snapshot()) == []


async def test_both_ends_of_a_cable_get_one_network(mac: World) -> None:
    here = await setup(mac, "--dry-run")
    service_stand_ins.plug_cables(mac.state, CAPTURES / "studio")
    there = await setup(mac, "--dry-run")
    assert "(en6): 10.82.0.225/30; the other end of its cable is 10.82.0.226" in here.out
    assert "(en3): 10.82.0.226/30; the other end of its cable is 10.82.0.225" in there.out


@pytest.mark.ci
async def test_an_address_set_by_hand_stays_until_it_may_be_replaced(mac: World) -> None:
    own = {"port": "Thunderbolt 2", "device": "en6", "on": True, "method": "Manual", "address": "10.0.9.1", "mask": "255.255.255.252"}  # fmt: skip
    change(mac, "By hand", **own)
    before = mac.snapshot()
    done = await setup(mac)
    assert 'note: Thunderbolt 2 (en6) stays: its network service "By hand" has the address 10.0.9.1' in done.out  # fmt: skip
    assert network(mac)["services"]["By hand"] == own
    assert "mlx-fleet Thunderbolt 2" not in network(mac)["services"]
    done = await setup(mac, "--replace")
    assert "switch off the network service By hand" in done.out
    assert network(mac)["services"]["mlx-fleet Thunderbolt 2"]["address"] == "10.82.0.225"
    await setup(mac, "--undo")
    assert difference(before, mac.snapshot()) == []


async def test_a_refusal_with_exit_code_0_is_noticed(mac: World) -> None:
    machine = service_stand_ins.machine_of(mac.state)
    machine["network"]["is_managed"] = True
    (mac.state / "machine.json").write_text(json.dumps(machine))
    done = await setup(mac)
    assert done.code == 1
    assert "`networksetup -setmanual mlx-fleet Thunderbolt 2 10.82.0.225" in done.err
    assert "a profile forbids it" in done.err
    assert (await setup(mac, "--undo")).code == 0


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_kill_9_before_any_change_converges(mac: World) -> None:
    """Kill the n-th change of a run, repeat it, undo it: both states are those without a kill."""
    installation = installation_at(mac.root, "launchd", is_user=False)
    run = partial(
        fabric_setup.apply_setup, installation, is_dry_run=False, is_replacing=False, salt=None
    )

    async def undo() -> None:
        await installation.installer.uninstall(link_plan.PART, lambda _: None)

    before = mac.snapshot()
    in_child(run)
    complete = mac.snapshot()
    in_child(undo)
    for number in range(5, 400, 13):
        was_killed = in_child(run, kill_before=number)
        in_child(run)
        assert difference(complete, mac.snapshot()) == [], number
        in_child(undo, kill_before=number)
        in_child(undo)
        assert difference(before, mac.snapshot()) == [], number
        if not was_killed:
            break
    assert not ChangeRecord(mac.layout.home).path.exists()
