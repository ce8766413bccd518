"""The verb `fleetctl bundle`: writes archives that install mlx-fleet on other machines."""

import tempfile
from pathlib import Path
from typing import Any

import click

from fleetctl.bundle import archive
from fleetctl.bundle.archive import BundleContents
from fleetctl.bundle.lock import PLATFORMS, PYTHONS
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from machinery import files
from machinery.version import version as fleet_version
from schemas import quantity

_HELP = """Write an archive that installs mlx-fleet on machines without a network.

\b
  fleetctl bundle create --out mlx-fleet.tar
  fleetctl bundle create --out mlx-fleet.tar --python-archive cpython-3.11-aarch64-apple-darwin-install_only.tar.gz

It contains the wheel of mlx-fleet, all packages that it needs, uv, a list of SHA-256 hashes, and install.sh, which
checks the list and installs. Without --python-archive (python-build-standalone's "install_only" archive), the machine
needs a Python of its own: `install.sh --python FILE`. Without --etcd-archive (a release of etcd), `fleetctl up` there
needs an etcd on PATH. docs/install.md describes the installation.
"""


@click.group(cls=SuggestingGroup)
def bundle() -> None:
    """Write archives that install mlx-fleet on other machines."""


@bundle.command(help=_HELP)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write."
)
@click.option(
    "--platform",
    type=click.Choice(sorted(PLATFORMS)),
    default="macos-arm64",
    show_default=True,
    help="Kind of machine to install on.",
)
@click.option(
    "--python-version",
    "python",
    type=click.Choice(PYTHONS),
    default=PYTHONS[0],
    show_default=True,
    help="Version of Python that the packages are for.",
)
@click.option(
    "--python-archive",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Python to include: a .tar.gz with python/bin/python3.",
)
@click.option(
    "--etcd-archive",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="etcd to include: a release of the etcd project for the platform, .zip or .tar.gz.",
)
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Wheel of mlx-fleet (default: this version's in the folder dist, where `make dist` writes it).",
)
@click.option(
    "--online",
    is_flag=True,
    help="Leave out packages and uv: machines download the packages by hash, and need uv.",
)
def create(
    out: Path,
    platform: str,
    wheel: Path | None,
    online: bool,
    **parts: Any,
) -> None:
    """Write an archive that installs mlx-fleet on machines without a network."""
    if online and parts["etcd_archive"] is not None:
        raise click.UsageError("--etcd-archive is for one platform; leave out --online")
    contents = BundleContents(
        wheel=wheel or _built_wheel(),
        platform=None if online else PLATFORMS[platform],
        **parts,
    )
    name = contents.folder_name
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            archive.fill(contents, folder, lambda line: click.echo(line, err=True))
            with files.open_replacement(out, mode=0o644) as file:
                archive.write_tar(folder, name, file)
    except OSError as error:
        raise FleetctlError(f"cannot write {out}: {error.strerror or error}") from error
    click.echo(f"{out}: {quantity.show(out.stat().st_size)}")
    if contents.python_archive is None and not online:
        click.echo(
            f"without a Python: install.sh needs --python with a Python {contents.python}", err=True
        )
    if contents.etcd_archive is None and not online:
        click.echo("without an etcd: `fleetctl up` there needs one on PATH", err=True)
    click.echo(f"install it there with: tar -xf {out.name} && sudo {name}/install.sh", err=True)


def _built_wheel() -> Path:
    wheel = Path("dist", f"mlx_fleet-{fleet_version()}-py3-none-any.whl")
    if not wheel.is_file():
        raise FleetctlError(
            f"{wheel} does not exist; build it with `make dist`, or give a wheel with --wheel"
        )
    return wheel
