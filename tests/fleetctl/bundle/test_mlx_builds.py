"""MLX's real wheels for macOS from the package index: which one the real uv takes, and what is in it."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.device_check import describe_build
from fleetctl.bundle.archive import download_packages, pins_of
from fleetctl.bundle.lock import PLATFORMS, PYTHONS, read_pins, render_lock
from fleetctl.cli.errors import FleetctlError
from machinery.mach_o import read_mach_o
from tests.support.release_wheels import real_uv

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]
LOCK = Path(__file__).parents[3] / "requirements.txt"
JACCL = "@rpath/libjaccl.dylib"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheels of mlx and mlx-metal that an archive for Macs has: 170 MB."""
    pins = read_pins(LOCK.read_text(encoding="utf-8"), source="requirements.txt")
    folder = tmp_path_factory.mktemp("wheels")
    try:
        mlx = [pin for pin in pins if pin.name in ("mlx", "mlx-metal")]
        download_packages(mlx, PLATFORMS["macos-arm64"], PYTHONS[0], folder)
    except FleetctlError as error:
        if "from versions: none" in str(error):
            pytest.skip("the package index cannot be reached: it lists no version of mlx")
        raise
    return folder


@pytest.mark.parametrize(
    ("system", "tag", "minimum", "has_jaccl"),
    [
        ("14.0", "macosx_14_0_arm64", "14.0", False),
        ("15.0", "macosx_15_0_arm64", "15.0", False),
        ("26.0", "macosx_26_0_arm64", "26.2", True),
        ("26.1", "macosx_26_0_arm64", "26.2", True),
        ("26.2", "macosx_26_0_arm64", "26.2", True),
    ],
)
def test_a_system_gets_its_build(
    wheels: Path, tmp_path: Path, system: str, tag: str, minimum: str, has_jaccl: bool
) -> None:
    """The tag cannot say 26.2: install.sh names 15.0 as the system of macOS 26.0 and 26.1 (test_install.py)."""
    lock, target = tmp_path / "lock.txt", tmp_path / "target"
    lock.write_text(render_lock(pins_of(wheels)), encoding="utf-8")
    command = [
        str(real_uv()),
        "pip",
        "install",
        "--quiet",
        "--no-config",
        "--offline",
        "--no-index",
    ]
    command += [
        "--no-deps",
        "--require-hashes",
        "--find-links",
        str(wheels),
        "--target",
        str(target),
    ]
    command += ["--python", sys.executable, "--python-version", PYTHONS[0]]
    command += ["--python-platform", "aarch64-apple-darwin", "--requirement", str(lock)]
    environment = {"MACOSX_DEPLOYMENT_TARGET": system, "UV_CACHE_DIR": str(wheels / "cache")}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for package in ("mlx", "mlx_metal"):
        (info,) = target.glob(f"{package}-*.dist-info/WHEEL")
        assert f"-{tag}\n" in info.read_text()
    build = describe_build(target / "mlx")
    assert (build["minimumSystem"], build["hasNax"]) == (minimum, has_jaccl)
    with (target / "mlx" / "lib" / "libmlx.dylib").open("rb") as file:
        library = read_mach_o(file)
    assert library.is_arm64
    assert (JACCL in library.libraries) == has_jaccl
    # 6997 names in 0.32.4.
    kernels = (target / "mlx" / "lib" / "mlx.metallib").read_bytes().count(b"_nax_")
    assert (kernels > 1000, kernels == 0) == (has_jaccl, not has_jaccl)
