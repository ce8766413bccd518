"""The check behind `make check-mac-wheels`: every dependency has an arm64 macOS wheel for each supported Python.

uv resolves the lock file for macOS and asks the package index; nothing is downloaded or installed.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from tabulate import tabulate

from fleetctl.bundle.lock import OLDEST_MACOS, PLATFORMS, PYTHONS, Pin, read_pins, render_lock
from machinery.environment import child_environment

_MAC = PLATFORMS["macos-arm64"]
# The index answers for 100 packages in a second; a slow network gets a minute for each Python.
_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelAnswer:
    """The answer of the index for one package and one Python; no error means that there is a wheel."""

    pin: Pin
    python: str
    error: str


def check(uv: Path, pins: Sequence[Pin], python: str) -> list[WheelAnswer]:
    """Return one answer for each package that a Mac with this Python needs."""
    needed = [pin for pin in pins if _MAC.needs(pin, python)]
    # Together they take a second. One by one tells which is missing.
    if not _error(uv, needed, python):
        return [WheelAnswer(pin=pin, python=python, error="") for pin in needed]
    return [WheelAnswer(pin=pin, python=python, error=_error(uv, [pin], python)) for pin in needed]


def _error(uv: Path, pins: Sequence[Pin], python: str) -> str:
    """Return why the wheels of these packages cannot be had; empty if they can."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "requirements.txt")
        lock.write_text(render_lock(pins), encoding="utf-8")
        command = [str(uv), "pip", "install", "--dry-run", "--no-config", "--target", folder]
        command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
        command += ["--python-platform", "aarch64-apple-darwin", "--python-version", python]
        command += ["--python", sys.executable, "--requirement", str(lock)]
        environment = child_environment({"MACOSX_DEPLOYMENT_TARGET": OLDEST_MACOS}, without=())
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer from the package index within {_LIMIT_S:.0f} s"
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return " ".join(lines[-3:]) or "uv failed" if done.returncode else ""


def render_table(answers: Sequence[WheelAnswer]) -> str:
    """Return a row for each package and a column for each Python: `yes`, `no`, or `-` where it is not needed."""
    by_place = {(answer.pin.requirement, answer.python): answer for answer in answers}
    pythons = sorted(
        {answer.python for answer in answers}, key=lambda text: int(text.split(".")[1])
    )
    rows = [
        [name, *(_cell(by_place.get((name, python))) for python in pythons)]
        for name in dict.fromkeys(answer.pin.requirement for answer in answers)
    ]
    return str(tabulate(rows, headers=["PACKAGE", *pythons], tablefmt="plain"))


def _cell(answer: WheelAnswer | None) -> str:
    if answer is None:
        return "-"
    return "no" if answer.error else "yes"


@click.command()
@click.option("--uv", type=click.Path(exists=True, path_type=Path), required=True)
@click.argument("lock", type=click.Path(exists=True, path_type=Path))
def main(uv: Path, lock: Path) -> None:
    """Print which packages of the file LOCK have arm64 macOS wheels; exit 1 if one has none."""
    pins = read_pins(lock.read_text(encoding="utf-8"), source=str(lock))
    answers = [answer for python in PYTHONS for answer in check(uv, pins, python)]
    click.echo(render_table(answers))
    missing = [answer for answer in answers if answer.error]
    for answer in missing:
        click.echo(f"{answer.pin.requirement}, Python {answer.python}: {answer.error}", err=True)
    if missing:
        click.echo(f"error: {len(missing)} wheels for macOS {OLDEST_MACOS} are missing", err=True)
        raise click.exceptions.Exit(1)
    packages = len({answer.pin.requirement for answer in answers})
    click.echo(f"{packages} packages have wheels for macOS {OLDEST_MACOS} on arm64")


if __name__ == "__main__":
    main()
