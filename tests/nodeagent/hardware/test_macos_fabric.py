"""The fabric of a machine from the output of macOS commands, and the addresses of a Linux machine."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.hardware import linux, macos_fabric, system_text
from nodeagent.hardware.macos_fabric import FabricOutput
from nodeagent.hardware.probe import SystemMachineReader
from schemas.node import FabricInterface, NodeFabric
from tests.support.golden_cases import Golden
from tests.support.sampling import samples

CAPTURES = Path(__file__).parent / "captures" / "fabric"


def printed(machine: str) -> FabricOutput:
    folder = CAPTURES / machine
    return FabricOutput(
        thunderbolt=(folder / "thunderbolt.json").read_text(),
        hardware_ports=(folder / "hardware_ports.txt").read_text(),
        ifconfig=(folder / "ifconfig.txt").read_text(),
        rdma_ctl=(folder / "rdma_ctl.txt").read_text(),
        ibv_devinfo=(folder / "ibv_devinfo.txt").read_text(),
        sysctl=(folder / "sysctl.txt").read_text(),
        sw_vers=(folder / "build.txt").read_text(),
    )


@pytest.mark.parametrize("machine", ["book", "studio", "old"])
def test_captures(machine: str, golden: Golden) -> None:
    """RDMA off, RDMA on, and a Mac before RDMA; a Mac behind a dock is no peer, for no RDMA goes through."""
    fabric = macos_fabric.assemble_fabric(printed(machine))
    text = fabric.model_dump_json(indent=2, exclude_defaults=True)
    golden.check_text(CAPTURES / machine / "fabric.json", f"{text}\n")


@pytest.mark.parametrize(("text", "is_enabled"), [
    ("enabled\n", True), (" Disabled \n", False),
    ("rdma_ctl: This tool needs to be executed from Recovery OS.\n", None),
    ("partially enabled", None), ("", None),
])  # fmt: skip
def test_rdma_ctl_is_one_word(text: str, is_enabled: bool | None) -> None:
    assert macos_fabric.parse_rdma_ctl(text) is is_enabled


@pytest.mark.parametrize(("text", "devices"), [
    ("No IB devices found\n", ()),
    ("hca_id: rdma_en9\n  state: PORT_ACTIVE (4)", (("rdma_en9", "en9", "Active"),)),
    # Indented as by ssh wrappers, without a state, and under a name that is no device of Apple's.
    ("  hca_id:\tmlx5_0\n", (("mlx5_0", "", "Unknown"),)),
    ("hca_id: rdma_en1 \nstate: PORT_DOWN\nhca_id:\n", (("rdma_en1", "en1", "Down"),)),
    ("phys_state: PORT_ACTIVE\n", ()),
])  # fmt: skip
def test_devices(text: str, devices: tuple[tuple[str, str, str], ...]) -> None:
    rdma_devices = macos_fabric.parse_devices(text)
    assert (
        tuple((device.name, device.interface, device.state) for device in rdma_devices) == devices
    )


@pytest.mark.parametrize(("sysctl", "profiler", "newest"), [
    pytest.param("machdep.cpu.brand_string: Apple M4\n", "", 4, id="by-chip"),
    pytest.param("machdep.cpu.brand_string: Apple M2\n", "", 4, id="the-newer-of-two"),
    pytest.param("machdep.cpu.brand_string: Apple M1\n", "", 3, id="first-chip"),
    pytest.param("", '"Up to 120 Gb/s"', 5, id="new-chip-by-its-ports"),
    pytest.param("", '"80 Gb/s"', 5, id="new-chip-by-its-cable"),
    pytest.param("", '"Up to 40 Gb/s"', 4, id="new-chip-without-tb5"),
    pytest.param("", '"very fast"', 0, id="nobody-can-tell"),
    pytest.param("", "17", 0, id="no-text"),
])  # fmt: skip
def test_newest_thunderbolt(sysctl: str, profiler: str, newest: int) -> None:
    tree = f'{{"SPThunderboltDataType": [{{"receptacle_1_tag": {{"current_speed_key": {profiler}}}}}]}}'
    assert macos_fabric.parse_thunderbolt(sysctl, tree if profiler else "") == newest


def test_a_bridge_that_is_down_has_no_members() -> None:
    """As `mlx.distributed_config` leaves it; and a member may have an address of its own."""
    text = (CAPTURES / "book" / "ifconfig.txt").read_text()
    down = text.replace("bridge0: flags=8863<UP,", "bridge0: flags=8822<")
    assert macos_fabric.parse_ifconfig(text).bridged == {"en1", "en2", "en6"}
    assert macos_fabric.parse_ifconfig(down).bridged == frozenset()


@pytest.mark.parametrize(("medium", "speed"), [
    ("autoselect (1000baseT <full-duplex,flow-control>)", {"en0": 1000}),
    ("10Gbase-T <full-duplex>", {"en0": 10_000}),
    ("autoselect (2500Base-T <full-duplex>)", {"en0": 2500}),
    ("autoselect <full-duplex>", {}),
    ("autoselect (none)", {}), ("<unknown type>", {}),
])  # fmt: skip
def test_the_medium_of_an_interface_has_its_speed(medium: str, speed: dict[str, int]) -> None:
    """The forms of ifmedia in the source of Apple's ifconfig, which the captures do not have."""
    text = f"en0: flags=8863<UP,BROADCAST,RUNNING> mtu 1500\n\tmedia: {medium}\n\tstatus: active\n"
    assert macos_fabric.parse_ifconfig(text).speeds == speed


def cut(text: str) -> st.SearchStrategy[str]:
    """Return the text without its end, or with something in its middle."""
    places = st.integers(0, len(text))
    return st.one_of(
        places.map(lambda at: text[:at]),
        st.tuples(places, st.text(max_size=8)).map(lambda p: text[: p[0]] + p[1] + text[p[0] :]),
    )


@settings(max_examples=samples(60))
@given(data=st.data(), machine=st.sampled_from(["book", "studio", "old"]))
def test_damaged_output_is_never_an_error(data: st.DataObject, machine: str) -> None:
    whole = printed(machine)
    fields = {name: data.draw(cut(getattr(whole, name))) for name in FabricOutput._fields}
    fabric = macos_fabric.assemble_fabric(FabricOutput(**fields))
    assert NodeFabric.model_validate_json(fabric.model_dump_json()) == fabric


@pytest.mark.parametrize("profiler", [
    "[]", "17",
    '{"SPThunderboltDataType": {}}',
    '{"SPThunderboltDataType": [17, {"receptacle_1_tag": []}, {"_items": [1, {"domain_uuid_key": 5}]}]}',
])  # fmt: skip
def test_other_trees_have_no_ports(profiler: str) -> None:
    assert macos_fabric.parse_ports(profiler, {}, frozenset()) == ()


async def test_a_mac_without_its_commands_was_not_looked_at() -> None:
    """None keeps the last report: a partial result would look like unplugged cables."""
    assert await macos_fabric.read_fabric() is None


@pytest.mark.parametrize(("text", "bits"), [
    ("255.255.255.0", 24), ("0xfffffffc", 30), ("0xffff0000", 16), ("255.0.255.0", 0), ("0x0", 0),
    ("", 0), ("0xfffffffff", 0),
])  # fmt: skip
def test_a_netmask_is_the_length_of_a_prefix(text: str, bits: int) -> None:
    assert system_text.parse_netmask(text) == bits


def test_linux_addresses() -> None:
    def at(address: str, family: int = socket.AF_INET) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address, netmask="255.255.255.0")

    interfaces = linux.parse_interfaces(
        {
            "thunderbolt0": [at("10.0.1.1"), at("fe80::1", socket.AF_INET6)],
            "lo": [at("127.0.0.1")],
            "eth0": [at("192.168.1.4"), at("192.168.1.5")],
            "wlp3s0": [at("192.168.2.4")],
        },
        {"eth0": 2500, "wlp3s0": 0},
    )
    assert interfaces == NodeFabric(
        interfaces=(
            FabricInterface(name="eth0", address="192.168.1.4", prefix_length=24, speed_mbps=2500),
            FabricInterface(name="eth0", address="192.168.1.5", prefix_length=24, speed_mbps=2500),
            FabricInterface(
                name="thunderbolt0", address="10.0.1.1", is_thunderbolt=True, prefix_length=24
            ),
            FabricInterface(
                name="wlp3s0", address="192.168.2.4", prefix_length=24, is_wireless=True
            ),
        )
    )


async def test_cables_are_looked_at_now_and_then(tmp_path: Path) -> None:
    machine = SystemMachineReader(tmp_path, platform="linux")
    found = [(await machine.take()).fabric is not None for _ in range(7)]
    assert found == [True, False, False, True, False, False, True]
