"""The Linux reader: on this machine, and on small file trees that stand for others."""

import platform
import sys
from pathlib import Path, PurePosixPath

import pytest

from nodeagent.hardware import linux
from nodeagent.hardware.readings import HardwareError, MemoryLimitSource

GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"
CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel name\t: AMD EPYC\n"
V2 = "0::/machine/agent\n"
V1 = "9:name=systemd:/\n4:memory:/pods/agent\n2:cpuacct,cpu:/\n0::/\n"
UNLIMITED_V1 = "9223372036854771712\n"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def tree(root: Path, **files: str) -> Path:
    """Write files; "__" stands for a slash, so that a table can name them as keywords."""
    everywhere = {"proc__meminfo": MEMINFO, "proc__cpuinfo": CPUINFO}
    for name, text in (everywhere | files).items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@on_linux
def test_this_machine() -> None:
    facts = linux.read_facts()
    assert facts.memory_bytes > 0
    assert facts.cpu_cores > 0
    assert 0 < facts.gpu_memory_limit_bytes < facts.memory_bytes
    assert facts.os == "Linux"
    assert facts.chip
    assert facts.hostname == platform.node()
    available = linux.available_memory_bytes()
    assert available is not None
    assert 0 < available <= facts.memory_bytes


def test_a_whole_machine(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        **{
            "etc__os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian"\n',
            "etc__machine-id": "3d1219c7c4c5404aaa1f6d2a48adfda4\n",
            "proc__sys__kernel__hostname": "build-7\n",
        },
    )
    facts = linux.read_facts(root)
    assert facts.chip == "AMD EPYC"
    assert facts.os_version == "Debian GNU/Linux 12 (bookworm)"
    assert facts.hardware_uuid == "3d1219c7-c4c5-404a-aa1f-6d2a48adfda4"
    assert (facts.hostname, facts.cpu_cores, facts.gpu_cores) == ("build-7", 2, 0)
    assert (facts.memory_bytes, facts.gpu_memory_limit_bytes) == (16 * GIB, 12 * GIB)
    assert (facts.thunderbolt, facts.memory_bandwidth_gbps) == (None, None)
    assert not facts.rdma_capable


def test_a_bare_machine_degrades_field_by_field(tmp_path: Path) -> None:
    facts = linux.read_facts(tree(tmp_path, proc__cpuinfo=""))
    assert facts.chip == platform.machine()
    assert facts.cpu_cores > 0
    assert facts.os_version == "unknown"
    assert not facts.hardware_uuid


def test_memory_is_never_guessed(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="MemTotal"):
        linux.read_facts(tmp_path)
    assert linux.available_memory_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "memory_gib", "source"),
    [
        pytest.param({}, 16, MemoryLimitSource.ESTIMATE, id="no-cgroup"),
        pytest.param(
            {
                "proc__self__cgroup": V2,
                "sys__fs__cgroup__machine__agent__memory.max": f"{4 * GIB}\n",
            },
            4,
            MemoryLimitSource.CGROUP,
            id="v2",
        ),
        pytest.param(
            {"proc__self__cgroup": V2, "sys__fs__cgroup__machine__agent__memory.max": "max\n"},
            16,
            MemoryLimitSource.ESTIMATE,
            id="v2-max",
        ),
        pytest.param(
            {
                "proc__self__cgroup": V2,
                "sys__fs__cgroup__machine__agent__memory.max": "max\n",
                "sys__fs__cgroup__machine__memory.max": f"{2 * GIB}\n",
            },
            2,
            MemoryLimitSource.CGROUP,
            id="v2-parent-binds",
        ),
        pytest.param(
            {"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": f"{8 * GIB}\n"},
            8,
            MemoryLimitSource.CGROUP,
            id="v2-container-namespace",
        ),
        pytest.param(
            {"proc__self__cgroup": "0::/../other\n", "sys__fs__cgroup__memory.max": f"{GIB}\n"},
            1,
            MemoryLimitSource.CGROUP,
            id="v2-outside-of-our-namespace",
        ),
        pytest.param(
            {
                "proc__self__cgroup": V2,
                "sys__fs__cgroup__machine__agent__memory.max": f"{64 * GIB}",
            },
            16,
            MemoryLimitSource.ESTIMATE,
            id="limit-above-the-machine",
        ),
        pytest.param(
            {
                "proc__self__cgroup": V1,
                "sys__fs__cgroup__memory__pods__agent__memory.limit_in_bytes": f"{3 * GIB}\n",
                "sys__fs__cgroup__memory__memory.limit_in_bytes": UNLIMITED_V1,
            },
            3,
            MemoryLimitSource.CGROUP,
            id="v1",
        ),
        pytest.param(
            {
                "proc__self__cgroup": V1,
                "sys__fs__cgroup__memory__memory.limit_in_bytes": f"{5 * GIB}\n",
            },
            5,
            MemoryLimitSource.CGROUP,
            id="v1-container-sees-only-its-own-group",
        ),
        pytest.param(
            {
                "proc__self__cgroup": V1,
                "sys__fs__cgroup__memory__pods__agent__memory.limit_in_bytes": UNLIMITED_V1,
            },
            16,
            MemoryLimitSource.ESTIMATE,
            id="v1-unlimited",
        ),
        pytest.param(
            {"proc__self__cgroup": "nonsense\n\n::\n", "sys__fs__cgroup__memory.max": "??"},
            16,
            MemoryLimitSource.ESTIMATE,
            id="nonsense",
        ),
    ],
)
def test_cgroup_limit(
    tmp_path: Path, files: dict[str, str], memory_gib: int, source: MemoryLimitSource
) -> None:
    facts = linux.read_facts(tree(tmp_path, **files))
    assert facts.memory_bytes == memory_gib * GIB
    assert facts.gpu_memory_limit_bytes == memory_gib * GIB * 75 // 100
    assert facts.gpu_memory_limit_source == source


@pytest.mark.parametrize(
    ("files", "available_gib"),
    [
        pytest.param({}, 8, id="machine"),
        pytest.param({"memory.max": 4 * GIB, "memory.current": GIB}, 3, id="group-has-less"),
        pytest.param({"memory.max": 15 * GIB, "memory.current": GIB}, 8, id="machine-has-less"),
        pytest.param({"memory.max": 4 * GIB, "memory.current": 5 * GIB}, 0, id="over-its-limit"),
        pytest.param({"memory.max": 4 * GIB}, 8, id="use-not-known"),
        pytest.param(
            {
                "memory.max": 4 * GIB,
                "memory.current": 3 * GIB,
                "memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
            },
            3,
            id="cache-counts-as-free",
        ),
    ],
)
def test_available(tmp_path: Path, files: dict[str, str | int], available_gib: int) -> None:
    group = {f"sys__fs__cgroup__machine__agent__{name}": str(text) for name, text in files.items()}
    root = tree(tmp_path, proc__self__cgroup=V2, **group)
    assert linux.available_memory_bytes(root) == available_gib * GIB


def test_cgroup_folders_go_from_the_group_to_the_root() -> None:
    assert linux.cgroup_folders(V1) == tuple(
        PurePosixPath(path) for path in ("memory/pods/agent", "memory/pods", "memory", ".")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3d1219c7c4c5404aaa1f6d2a48adfda4\n", "3d1219c7-c4c5-404a-aa1f-6d2a48adfda4"),
        ("uninitialized\n", ""),
        ("", ""),
    ],
)
def test_machine_id(text: str, expected: str) -> None:
    assert linux.parse_machine_id(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NAME=Alpine\nVERSION_ID='3.22'\n", "Alpine 3.22"),
        ("NAME=Arch\n", "Arch"),
        ("", "unknown"),
    ],
)
def test_os_release(text: str, expected: str) -> None:
    assert linux.parse_os_release(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nModel : Raspberry Pi 5\n", "Raspberry Pi 5"),
        ("processor : 0\nCPU implementer : 0x41\n", None),
    ],
)
def test_arm_cpu_name(text: str, expected: str | None) -> None:
    assert linux.parse_cpu_name(text) == expected


@pytest.mark.parametrize("text", ["MemTotal:\n", "MemTotal: many kB\n", ""])
def test_damaged_meminfo(text: str) -> None:
    assert linux.parse_meminfo(text, "MemTotal") is None
