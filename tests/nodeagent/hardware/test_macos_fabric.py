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
from schemas.node import FabricInterface, NodeFabric, RdmaDevice, ThunderboltPort
from tests.support.sampling import samples

CAPTURES = Path(__file__).parent / "captures" / "fabric"


def domain(number: int) -> str:
    return f"5EED0000-0000-4000-8000-{number:012d}"


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


VPN = FabricInterface(name="utun0", address="100.64.0.7", prefix_length=32)
BOOK = NodeFabric(
    interfaces=(
        FabricInterface(name="en0", address="192.168.1.21", prefix_length=30, is_wireless=True),
        FabricInterface(
            name="bridge0", address="169.254.70.2", is_thunderbolt=True, prefix_length=16
        ),
        VPN,
    ),
    ports=(
        ThunderboltPort(receptacle="1", interface="en1", domain=domain(11), is_bridged=True),
        ThunderboltPort(
            receptacle="2",
            interface="en6",
            domain=domain(12),
            peer=domain(22),
            speed_gbps=80,
            is_bridged=True,
        ),
        # A dock, and a Mac behind it: no RDMA goes through.
        ThunderboltPort(
            receptacle="3", interface="en2", domain=domain(13), speed_gbps=80, is_bridged=True
        ),
    ),
    is_rdma_enabled=False,
    thunderbolt=5,
    os_build="25D125",
)
STUDIO = NodeFabric(
    interfaces=(
        FabricInterface(name="en0", address="192.168.1.22", prefix_length=30),
        FabricInterface(name="en3", address="10.0.1.2", is_thunderbolt=True, prefix_length=30),
        VPN,
    ),
    ports=(
        ThunderboltPort(receptacle="1", interface="en2", domain=domain(21)),
        ThunderboltPort(
            receptacle="2", interface="en3", domain=domain(22), peer=domain(12), speed_gbps=80
        ),
        ThunderboltPort(receptacle="3", interface="en4", domain=domain(23)),
        ThunderboltPort(receptacle="4", interface="en5", domain=domain(24), speed_gbps=80),
        ThunderboltPort(receptacle="5", interface="en6", domain=domain(25)),
        ThunderboltPort(receptacle="6", interface="en7", domain=domain(26)),
    ),
    rdma=(
        RdmaDevice(name="rdma_en2", interface="en2", state="Down"),
        RdmaDevice(name="rdma_en3", interface="en3", state="Active"),
        RdmaDevice(name="rdma_en4", interface="en4", state="Down"),
        RdmaDevice(name="rdma_en5", interface="en5", state="Down"),
        RdmaDevice(name="rdma_en6", interface="en6", state="Down"),
        RdmaDevice(name="rdma_en7", interface="en7", state="Unknown"),
    ),
    is_rdma_enabled=True,
    thunderbolt=5,
    os_build="25D125",
)
OLD = NodeFabric(
    interfaces=(FabricInterface(name="en0", address="192.168.1.23", prefix_length=30), VPN),
    ports=(
        ThunderboltPort(receptacle="1", interface="en2", domain=domain(31), is_bridged=True),
        ThunderboltPort(
            receptacle="2",
            interface="en3",
            domain=domain(32),
            peer=domain(42),
            speed_gbps=40,
            is_bridged=True,
        ),
    ),
    thunderbolt=4,
    os_build="24G90",
)


@pytest.mark.parametrize(
    ("machine", "fabric"),
    [
        pytest.param("book", BOOK, id="rdma-off"),
        pytest.param("studio", STUDIO, id="rdma-on"),
        pytest.param("old", OLD, id="before-rdma"),
    ],
)
def test_captures(machine: str, fabric: NodeFabric) -> None:
    assert macos_fabric.assemble_fabric(printed(machine)) == fabric


@pytest.mark.parametrize(
    ("text", "is_enabled"),
    [
        ("enabled\n", True),
        (" Disabled \n", False),
        ("rdma_ctl: This tool needs to be executed from Recovery OS.\n", None),
        ("partially enabled", None),
        ("", None),
    ],
)
def test_rdma_ctl_is_one_word(text: str, is_enabled: bool | None) -> None:
    assert macos_fabric.parse_rdma_ctl(text) is is_enabled


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("No IB devices found\n", ()),
        ("hca_id: rdma_en9\n  state: PORT_ACTIVE (4)", (("rdma_en9", "en9", "Active"),)),
        # Indented as by ssh wrappers, without a state, and under a name that is no device of Apple's.
        ("  hca_id:\tmlx5_0\n", (("mlx5_0", "", "Unknown"),)),
        ("hca_id: rdma_en1 \nstate: PORT_DOWN\nhca_id:\n", (("rdma_en1", "en1", "Down"),)),
        ("phys_state: PORT_ACTIVE\n", ()),
    ],
)
def test_devices(text: str, devices: tuple[tuple[str, str, str], ...]) -> None:
    rdma_devices = macos_fabric.parse_devices(text)
    assert (
        tuple((device.name, device.interface, device.state) for device in rdma_devices) == devices
    )


@pytest.mark.parametrize(
    ("sysctl", "profiler", "newest"),
    [
        pytest.param("machdep.cpu.brand_string: Apple M4\n", "", 4, id="by-chip"),
        pytest.param("machdep.cpu.brand_string: Apple M2\n", "", 4, id="the-newer-of-two"),
        pytest.param("machdep.cpu.brand_string: Apple M1\n", "", 3, id="first-chip"),
        pytest.param("", '"Up to 120 Gb/s"', 5, id="new-chip-by-its-ports"),
        pytest.param("", '"80 Gb/s"', 5, id="new-chip-by-its-cable"),
        pytest.param("", '"Up to 40 Gb/s"', 4, id="new-chip-without-tb5"),
        pytest.param("", '"very fast"', 0, id="nobody-can-tell"),
        pytest.param("", "17", 0, id="no-text"),
    ],
)
def test_newest_thunderbolt(sysctl: str, profiler: str, newest: int) -> None:
    tree = f'{{"SPThunderboltDataType": [{{"receptacle_1_tag": {{"current_speed_key": {profiler}}}}}]}}'
    assert macos_fabric.parse_thunderbolt(sysctl, tree if profiler else "") == newest


def test_a_bridge_that_is_down_has_no_members() -> None:
    """As `mlx.distributed_config` leaves it; and a member may have an address of its own."""
    text = (CAPTURES / "book" / "ifconfig.txt").read_text()
    down = text.replace("bridge0: flags=8863<UP,", "bridge0: flags=8822<")
    assert macos_fabric.parse_ifconfig(text).bridged == {"en1", "en2", "en6"}
    assert macos_fabric.parse_ifconfig(down).bridged == frozenset()


@pytest.mark.parametrize(
    ("medium", "speed"),
    [
        ("autoselect (1000baseT <full-duplex,flow-control>)", {"en0": 1000}),
        ("10Gbase-T <full-duplex>", {"en0": 10_000}),
        ("autoselect (2500Base-T <full-duplex>)", {"en0": 2500}),
        ("autoselect <full-duplex>", {}),
        ("autoselect (none)", {}),
        ("<unknown type>", {}),
    ],
)
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


@pytest.mark.parametrize(
    "profiler",
    [
        "[]",
        "17",
        '{"SPThunderboltDataType": {}}',
        '{"SPThunderboltDataType": [17, {"receptacle_1_tag": []}, {"_items": [1, {"domain_uuid_key": 5}]}]}',
    ],
)
def test_other_trees_have_no_ports(profiler: str) -> None:
    assert macos_fabric.parse_ports(profiler, {}, frozenset()) == ()


async def test_a_mac_without_its_commands_was_not_looked_at() -> None:
    """None keeps the last report: a partial result would look like unplugged cables."""
    assert await macos_fabric.read_fabric() is None


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("255.255.255.0", 24),
        ("0xfffffffc", 30),
        ("0xffff0000", 16),
        ("255.0.255.0", 0),
        ("0x0", 0),
        ("", 0),
        ("0xfffffffff", 0),
    ],
)
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
