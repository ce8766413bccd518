"""File trees in place of a Linux machine's /proc and /sys."""

from pathlib import Path

MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"
CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel name\t: AMD EPYC\n"
CGROUP_V2 = "0::/machine/agent\n"
CGROUP_V1 = "9:name=systemd:/\n4:memory:/pods/agent\n2:cpuacct,cpu:/\n0::/\n"


def write_tree(root: Path, **files: str) -> Path:
    """Write files; "__" stands for a slash, so that a table can name them as keywords."""
    everywhere = {"proc__meminfo": MEMINFO, "proc__cpuinfo": CPUINFO}
    for name, text in (everywhere | files).items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
