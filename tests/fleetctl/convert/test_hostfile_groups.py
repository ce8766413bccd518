"""Host files: conversion to ShardGroups and back, and errors with line and field."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx._distributed_utils.common import Hostfile

from fleetctl.__main__ import main
from fleetctl.convert.hostfile_groups import (
    HOSTFILE_KINDS,
    GroupImport,
    GroupOptions,
    HostFileExportError,
    build_group,
    render_hostfile,
)
from fleetctl.convert.hostfile_reader import read_hostfile
from fleetctl.convert.node_names import NodeNames
from fleetctl.fabric import admission
from manifests.errors import ManifestErrors
from manifests.load import load_objects
from schemas.meta import ObjectMeta
from schemas.shardgroup import Backend, GroupMember, ShardGroup, ShardGroupSpec
from tests.support.sampling import samples

LAUNCH = """{
\t"backend": "jaccl",
\t"envs": ["MLX_METAL_FAST_SYNCH=1", "HF_HUB_OFFLINE=1", "MLX_RANK=0"],
\t"hosts": [
\t\t{"ssh": "me@Studio-1.local", "ips": ["10.0.0.1"], "rdma": [null, "rdma_en5"]},
\t\t{"ssh": "studio-2", "ips": [], "rdma": [["rdma_en5", "rdma_en4"], null], "colour": 1}
\t]
}"""


def imported(text: str, *nodes: str, backend: Backend | None = None) -> GroupImport:
    return build_group(
        read_hostfile(text, "hosts.json"),
        GroupOptions(name="g", nodes=NodeNames(given=nodes), backend=backend),
    )


def members(found: GroupImport) -> list[tuple[str, tuple[str, ...], dict[str, tuple[str, ...]]]]:
    return [(m.node, m.addresses, m.rdma) for m in found.group.spec.members]


def test_a_host_file_of_mlx_launch() -> None:
    group_import = imported(LAUNCH)
    assert members(group_import) == [
        ("studio-1", ("10.0.0.1",), {"studio-2": ("rdma_en5",)}),
        ("studio-2", (), {"studio-1": ("rdma_en5", "rdma_en4")}),
    ]
    assert group_import.group.spec.backend == "jaccl"
    assert group_import.group.spec.environment == {"MLX_METAL_FAST_SYNCH": "1"}
    notes = "\n".join(group_import.notes)
    for word in ("colour", "HF_HUB_OFFLINE=1", "MLX_RANK", "me@Studio-1.local", "studio-2: taken"):
        assert word in notes


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        pytest.param('["10.0.0.1:5555", "10.0.0.2:5555"]', [1, 1], id="localai"),
        pytest.param('[["10.0.0.1:1", "10.0.0.1:2"], ["10.0.0.2:1"]]', [2, 1], id="mlx"),
        pytest.param('[["10.0.0.1:1"], "10.0.0.2:1"]', [1, 1], id="mixed"),
    ],
)
def test_a_ring_needs_node_names(text: str, addresses: list[int]) -> None:
    with pytest.raises(ManifestErrors, match=r"hosts\.json:1:2: \[0\]: .*--nodes"):
        imported(text)
    group_import = imported(text, "a", "b")
    assert [len(member.addresses) for member in group_import.group.spec.members] == addresses
    assert group_import.group.spec.backend == "ring"
    assert "listen on spec.port" in group_import.notes[0]


def test_a_full_matrix_is_jaccl_and_a_ring_of_devices_jaccl_ring() -> None:
    full = [[None if a == b else f"rdma_en{b}" for b in range(4)] for a in range(4)]
    assert imported(json.dumps(full), *"abcd").group.spec.backend == "jaccl"
    circle = [
        [None if (b - a) % 4 == 2 else cell for b, cell in enumerate(row)]
        for a, row in enumerate(full)
    ]
    group_import = imported(json.dumps(circle), *"abcd")
    assert group_import.group.spec.backend == "jaccl-ring"
    assert sorted(group_import.group.spec.members[0].rdma) == ["b", "d"]
    with pytest.raises(
        ManifestErrors, match=r"\[0\]: .*rank 0 \(a\) to rank 2 \(c\) \(and 3 more\)"
    ):
        imported(json.dumps(circle), *"abcd", backend="jaccl")


def test_a_variable_can_select_jaccl_ring() -> None:
    text = LAUNCH.replace("HF_HUB_OFFLINE", "MLX_JACCL_RING")
    assert imported(text).group.spec.backend == "jaccl-ring"


REFUSED = [
    pytest.param("", "hosts.json:1:1: is not JSON", id="empty"),
    pytest.param("null", "the file is null. Expected", id="null"),
    pytest.param('{"hosts": [,]}', "hosts.json:1:12: is not JSON", id="syntax"),
    pytest.param("[" * 5000 + "]" * 5000, "nested", id="deep"),
    pytest.param(f"[{'9' * 5000}]", "a number of thousands of digits", id="long-number"),
    pytest.param("{}", "hosts: expected a list of hosts, got nothing", id="no hosts"),
    pytest.param('{"hosts": {}}', "1:2: hosts: expected a list of hosts, got a mapping", id="hosts"),
    pytest.param("[1, 2]", "is not a host file", id="numbers"),
    pytest.param('["a", "b"]', "is not a host file", id="names"),
    pytest.param('[\n"10.0.0.1"\n, "10.0.0.1:0"]', "hosts.json:3:3: [1]: expected", id="port 0"),
    pytest.param('["10.0.0.1:99999", "a:1"]', "[0]: expected", id="port too high"),
    pytest.param('["mac.local:1", "10.0.0.1:1"]', '"mac.local" is not an IPv4 address', id="name"),
    pytest.param('["::1:1", "10.0.0.1:1"]', "is not an IPv4 address. Use the number", id="ipv6"),
    pytest.param('[{"ssh": "a"}, 3]', "is not a host file", id="host of no shape"),
    pytest.param('{"hosts": [{"ssh": "a"},\n 3]}', "2:2: hosts[1]: expected a host", id="host"),
    pytest.param('[{"ips": []}, {"ssh": "b"}]', "[0].ssh: expected the ssh destination", id="no ssh"),
    pytest.param('[{"ssh": "a", "ips": "x"}]', "[0].ips: expected a list", id="ips"),
    pytest.param('[{"ssh": "a", "ips": [7]}]', "[0].ips[0]: expected an address", id="ip"),
    pytest.param('[{"ssh": "a"}]', "has 1 rank, but a group needs at least two", id="one"),
    pytest.param('[{"ssh": "a"}, {"ssh": "x@A.local"}]', "[1]: ranks 0 and 1 are both on a", id="twice"),
    pytest.param('[{"ssh": "a"}, {"ssh": "10.0.0.2"}]', "[1]: does not name the node", id="address"),
    pytest.param('{"backend": "mpi", "hosts": [{"ssh": "a"}, {"ssh": "b"}]}', "backend: mpi is not supported", id="mpi"),
    pytest.param('{"envs": ["X"], "hosts": [{"ssh": "a"}, {"ssh": "b"}]}', "envs[0]: expected", id="env"),
    pytest.param('[[null, "x"], [null, "x"]]', "[1][1]: is a device from the rank", id="itself"),
    pytest.param('[[null, "x"], ["x"]]', "[1]: names devices to 1 of 2", id="short row"),
    pytest.param('[[null, 7], ["x", null]]', "[0][1]: expected null, a device", id="device"),
    pytest.param('[[null, []], ["x", null]]', "[0][1]: expected null, a device", id="no device"),
    pytest.param('[{"ssh": "a", "ssh": "b"}, {"ssh": "c"}]', "ssh", id="key twice"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refusals_name_line_and_field(text: str, message: str) -> None:
    with pytest.raises(ManifestErrors) as caught:
        imported(text)
    assert message in str(caught.value)
    assert all(problem.source == "hosts.json" for problem in caught.value.problems)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ManifestErrors) as caught:
        imported('[{"ips": ["x"]},\n {"ssh": "b", "ips": ["y"], "rdma": [null]}]')
    assert [(p.line, p.path) for p in caught.value.problems] == [
        (1, "[0].ssh"), (1, "[0].ips[0]"), (2, "[1].ips[0]"), (2, "[1].rdma"),
    ]  # fmt: skip


def test_a_group_has_at_most_16_macs() -> None:
    ring = json.dumps([f"10.0.0.{n}:1" for n in range(17)])
    with pytest.raises(ManifestErrors, match="splits over 17 Macs, and 16 are the most"):
        imported(ring, *(f"n{n}" for n in range(17)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.sampled_from(["10.0.0.1", "10.0.0.1:5000", "rdma_en5", "MLX_A=1"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["ssh", "ips", "rdma", "hosts", "backend", "envs", "x"]) | st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=samples(60))
@given(value=json_values)
@example(value=[{"ssh": "a\ud800"}, {"ssh": "b"}])
@example(value=[{"ssh": "a", "x\u2028- y": 1}, {"ssh": "b"}])
@example(value={"hosts": [{"ssh": "a\n# b: c"}, {"ssh": "b"}], "envs": ["MLX_A=\n- x", "B=\n- x"]})
def test_any_json_is_read_or_refused(value: object) -> None:
    try:
        group_import = imported(json.dumps(value))
    except ManifestErrors as error:
        refusal = str(error)
    else:
        refusal = ""
        _loads_again(group_import)
    refusal.encode()


def _loads_again(found: GroupImport) -> None:
    """Check that the manifest loads as the same group, whatever its comments contain."""
    (loaded,) = load_objects(["-"], stdin=io.BytesIO(found.manifest().encode()))
    assert loaded.obj == found.group


@st.composite
def a_group(draw: st.DrawFn) -> ShardGroup:
    """Return a group that uses only settings that host files can express."""
    size = draw(st.integers(2, 4))
    names = [f"mac-{n}" for n in range(size)]
    backend: Backend = draw(st.sampled_from(["ring", "jaccl", "jaccl-ring"]))
    device = st.lists(st.sampled_from(["rdma_en4", "rdma_en5"]), min_size=1, max_size=2).map(tuple)
    address = st.sampled_from(["10.0.0.1", "192.168.5.1", "169.254.7.255"])
    made = []
    for rank, name in enumerate(names):
        peers = [
            peer
            for other, peer in enumerate(names)
            if other != rank and (backend == "jaccl" or (other - rank) % size in (1, size - 1))
        ]
        made.append(
            GroupMember(
                node=name,
                addresses=tuple(draw(st.lists(address, min_size=1, max_size=2))),
                rdma={peer: draw(device) for peer in peers} if backend != "ring" else {},
            )
        )
    environment = draw(
        st.dictionaries(st.sampled_from(["MLX_METAL_FAST_SYNCH", "JACCL_X"]), st.sampled_from(["", "1", "a=b"]))
    )  # fmt: skip
    spec = ShardGroupSpec(members=tuple(made), backend=backend, environment=environment)
    return ShardGroup(metadata=ObjectMeta(name="g"), spec=spec)


@settings(max_examples=samples(40))
@given(group=a_group())
def test_an_exported_group_can_be_imported_again(group: ShardGroup) -> None:
    seats = admission.declared_seats(group.spec)
    assert seats is not None
    names = [seat.node for seat in seats]
    launch = render_hostfile(group, seats, "launch", 32323)
    assert launch.left_out == ()
    assert imported(launch.text).group == group
    # Each other format preserves its part of the group.
    listening = render_hostfile(group, seats, "ring", 40000).text
    ports = [int(place.rpartition(":")[2]) for row in json.loads(listening) for place in row]
    assert ports == list(range(40000, 40000 + len(ports)))
    ring = imported(listening, *names).group.spec
    assert [m.addresses for m in ring.members] == [m.addresses for m in group.spec.members]
    flat = imported(render_hostfile(group, seats, "localai-ring", 40000).text, *names).group.spec
    assert [m.addresses for m in flat.members] == [m.addresses[:1] for m in group.spec.members]
    if group.spec.backend == "ring":
        with pytest.raises(HostFileExportError, match="no RDMA devices"):
            render_hostfile(group, seats, "devices", 1)
        return
    matrix = imported(
        render_hostfile(group, seats, "devices", 1).text, *names, backend=group.spec.backend
    )
    assert [m.rdma for m in matrix.group.spec.members] == [m.rdma for m in group.spec.members]


# MLX does not close the file.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_mlx_reads_the_file(tmp_path: Path) -> None:
    group = imported(LAUNCH).group
    members_ = tuple(m.model_copy(update={"addresses": ("10.0.0.9",)}) for m in group.spec.members)
    spec = group.spec.model_copy(update={"members": members_})
    whole = group.model_copy(update={"spec": spec})
    seats = admission.declared_seats(spec)
    assert seats is not None
    file = tmp_path / "hosts.json"
    file.write_text(render_hostfile(whole, seats, "launch", 1).text)
    theirs = Hostfile.from_file(file)  # type: ignore[no-untyped-call] # MLX has no types here
    assert [(h.ssh_hostname, h.ips, h.rdma) for h in theirs.hosts] == [
        ("studio-1", ["10.0.0.9"], [None, "rdma_en5"]),
        ("studio-2", ["10.0.0.9"], [["rdma_en5", "rdma_en4"], None]),
    ]
    assert (theirs.backend, theirs.envs) == ("jaccl", ["MLX_METAL_FAST_SYNCH=1"])


def test_settings_that_a_format_cannot_express_are_listed() -> None:
    member = tuple(GroupMember(node=n, addresses=("10.0.0.1", "10.0.0.2")) for n in "abc")
    spec = ShardGroupSpec(members=member, size=2, parallelism="Pipeline", reservation="Exclusive")
    group = ShardGroup(metadata=ObjectMeta(name="g"), spec=spec)
    seats = admission.declared_seats(spec)
    assert seats is not None
    assert [seat.node for seat in seats] == ["a", "b"]
    omitted = {
        kind: render_hostfile(group, seats, kind, 1).left_out
        for kind in HOSTFILE_KINDS
        if kind != "devices"
    }
    rest = ("spec.parallelism", "spec.reservation")
    assert omitted["launch"] == omitted["ring"] == (*rest, "the spare c")
    assert omitted["localai-ring"] == (
        *rest,
        "all but the first address of each Mac",
        "the spare c",
    )


def test_the_verb_writes_a_manifest(tmp_path: Path) -> None:
    file, made = tmp_path / "Two Studios.json", tmp_path / "made.yaml"
    file.write_text(LAUNCH)
    run = CliRunner().invoke(main, ["import", "hostfile", str(file), "-o", str(made)])
    assert (run.exit_code, run.output) == (0, "")
    (loaded,) = load_objects([str(made)])
    assert loaded.obj == imported(LAUNCH).group.model_copy(
        update={"metadata": ObjectMeta(name="two-studios")}
    )
    piped = CliRunner().invoke(main, ["import", "hostfile", "-"], input="[1]")
    assert piped.exit_code == 1
    assert "error: nothing was imported:\nstandard input:1:1: is not a host file" in piped.output
    bad = CliRunner().invoke(main, ["import", "hostfile", str(file), "--name", "Two"])
    assert bad.exit_code == 2
