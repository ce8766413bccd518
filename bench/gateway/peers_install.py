"""Installs other gateways for the benches: `make bench-gateway-peers`. No root rights; nothing outside one folder.

Routers come from the package index, each into a virtual environment of its own; nginx and haproxy are Debian's
packages, unpacked and not installed. On a Mac: `brew install nginx haproxy`, they are found on PATH.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.gateway.peers import FOLDER, SYSTEM
from bench.result import of_peer, recorded

_PACKAGES = {
    "vllm-router": "vllm-router",
    "sglang-router": "sglang-router",
    "litellm": "litellm[proxy]",
}
# What their programs need beyond a minimal Debian 12.
_DEBIAN = {
    "nginx": ("nginx",),
    "haproxy": (
        "haproxy",
        "liblua5.3-0",
        "libopentracing-c-wrapper0",
        "libopentracing1",
        "libpcre2-8-0",
    ),
}


def from_index(name: str, package: str) -> None:
    """Make a virtual environment with the package, if there is none."""
    folder = FOLDER / name
    if (folder / "ready").exists():
        return
    print(f"installing {package} into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, package], check=True)
    (folder / "ready").touch()


def from_debian(name: str, packages: tuple[str, ...]) -> None:
    """Unpack Debian's packages, unless the program is there."""
    if shutil.which(name) or (SYSTEM / "usr/sbin" / name).exists():
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        print(f"{name}: not on PATH, and there is no apt-get; install it yourself")
        return
    print(f"unpacking {' '.join(packages)} into {SYSTEM}", flush=True)
    SYSTEM.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["apt-get", "download", "-q", *packages], cwd=folder, check=False)
        if done.returncode:
            print(f"{name}: not downloaded; `apt-get update` may help")
            return
        for deb in sorted(Path(folder).glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(deb), str(SYSTEM)], check=True)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, packages in _DEBIAN.items():
        from_debian(name, packages)
    failed: dict[str, str] = {}
    for name, package in _PACKAGES.items():
        with recorded(failed, name), of_peer():
            from_index(name, package)
