"""install.sh with a small release and the real uv: what is installed, what a kill leaves, what is refused."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fleetctl.bundle.lock import PLATFORMS
from tests.support.release_wheels import PLATFORM, PYTHON, SCRIPT, Index, write_etcd_release

pytestmark = pytest.mark.ci


_LIMIT_S = 60


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """Return a package index with one dependency, and uv."""
    with pytest.MonkeyPatch.context() as patch:
        yield Index.create(tmp_path_factory.mktemp("packages") / "index", patch)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, index: Index) -> Path:
    """Return the unpacked archive of 1.0.0. Tests that change it take a copy."""
    return index.unpacked(tmp_path_factory.mktemp("first"), "1.0.0")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, index: Index) -> Path:
    """Return the unpacked archive of 1.1.0."""
    return index.unpacked(tmp_path_factory.mktemp("second"), "1.1.0")


class Installation:
    """A prefix, with a space in its name as in `Application Support`."""

    def __init__(self, root: Path) -> None:
        self.prefix = root / "the prefix"

    def command(self, folder: Path, *flags: str) -> list[str]:
        return [str(folder / "install.sh"), "--prefix", str(self.prefix), *flags]

    def run(
        self, folder: Path, *flags: str, programs: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        path = os.environ["PATH"] if programs is None else f"{programs}:/usr/bin:/bin"
        return subprocess.run(
            self.command(folder, *flags),
            env=dict(os.environ, PATH=path),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            cwd="/",
        )

    def install(self, folder: Path, *, programs: Path | None = None) -> str:
        done = self.run(folder, "--python", sys.executable, programs=programs)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def version(self) -> str:
        """Return what the linked programs say: the same under both names."""
        (version,) = {
            subprocess.run(
                [self.prefix / "bin" / name, "--version"],
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=True,
            ).stdout.split()[1]
            for name in ("fleetctl", "mlx-fleet")
        }
        return version

    def tree(self) -> dict[str, int]:
        """Return all files, with the times of their last change."""
        return {str(path): path.lstat().st_mtime_ns for path in self.prefix.rglob("*")}


@pytest.fixture
def there(tmp_path: Path) -> Installation:
    """Return an empty place to install in."""
    return Installation(tmp_path)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Return why an installation was refused."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_a_second_installation_changes_nothing(first: Path, there: Installation) -> None:
    there.install(first)
    assert there.version() == "1.0.0"
    before = there.tree()
    assert "nothing to do" in there.install(first)
    assert {path: time for path, time in there.tree().items() if path != str(there.prefix)} == {
        path: time for path, time in before.items() if path != str(there.prefix)
    }
    assert {path.name for path in there.prefix.iterdir()} == {"bin", "current", "versions"}


def test_an_upgrade_and_a_rollback_move_the_link(
    first: Path, second: Path, there: Installation
) -> None:
    for folder, version in ((first, "1.0.0"), (second, "1.1.0")):
        there.install(folder)
        assert there.version() == version
    installed = there.prefix / "current"
    assert there.run(installed, "--list").stdout == "1.0.0\n1.1.0 (current)\n"
    assert there.run(installed, "--use", "1.0.0").returncode == 0
    assert there.version() == "1.0.0"
    assert "Installed: 1.0.0 1.1.0" in refused(there.run(installed, "--use", "1.2.0"))


def test_an_installed_script_works_on_the_folder_that_it_is_in(
    first: Path, there: Installation, tmp_path: Path
) -> None:
    there.install(first)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, cwd="/",
            env=dict(os.environ, HOME=str(tmp_path)),
        )  # fmt: skip

    assert run(f"{there.prefix}/current/install.sh", "--list").stdout == "1.0.0 (current)\n"
    assert run(f"{there.prefix}/versions/1.0.0/install.sh", "--list").stdout == "1.0.0 (current)\n"
    done = run(f"{there.prefix}/current/install.sh", "--uninstall")
    assert f"removed the programs in {there.prefix}" in done.stdout
    assert not (there.prefix / "versions").exists()
    assert list((there.prefix / "bin").iterdir()) == []


def test_uninstall_where_nothing_is_installed_is_refused(first: Path, there: Installation) -> None:
    assert "nothing is installed in" in refused(there.run(first, "--uninstall"))
    assert not there.prefix.exists()


@pytest.mark.full
def test_a_version_is_installed_beside_the_one_in_use(
    first: Path, second: Path, there: Installation
) -> None:
    assert there.run(first, "--keep-current", "--python", sys.executable).returncode == 0
    assert there.version() == "1.0.0", "nothing was in use"
    done = there.run(second, "--keep-current", "--python", sys.executable)
    assert "1.1.0 is installed" in done.stdout
    assert "beside 1.0.0" in done.stdout
    assert there.version() == "1.0.0"
    assert there.run(there.prefix / "current", "--list").stdout == "1.0.0 (current)\n1.1.0\n"


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("prepare", marks=pytest.mark.full),
        pytest.param("create the environment", marks=pytest.mark.full),
        "install the packages",
        pytest.param("try it", marks=pytest.mark.full),
        "use 1.1.0",
    ],
)
def test_a_kill_at_any_step_leaves_a_working_version(
    first: Path, second: Path, there: Installation, step: str
) -> None:
    there.install(first)
    process = subprocess.Popen(
        there.command(second, "--python", sys.executable),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step: {step}"):
            break
    else:
        pytest.fail("the step was not reached")
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(_LIMIT_S) == -signal.SIGKILL
    process.stdout.close()
    assert there.version() in (["1.0.0", "1.1.0"] if step == "use 1.1.0" else ["1.0.0"])
    there.install(second)
    assert there.version() == "1.1.0"
    assert {path.name for path in there.prefix.iterdir()} == {"bin", "current", "versions"}


def test_a_release_that_does_not_run_is_not_used(
    tmp_path: Path, index: Index, first: Path, there: Installation
) -> None:
    there.install(first)
    broken = index.unpacked(tmp_path, "1.1.0", code="raise SystemExit('broken')")
    done = there.run(broken, "--python", sys.executable)
    assert done.returncode == 1
    said = done.stderr
    assert "does not run" in said
    assert there.version() == "1.0.0"
    assert there.run(there.prefix / "current", "--list").stdout == "1.0.0 (current)\n"


def test_changed_files_are_refused(tmp_path: Path, first: Path, there: Installation) -> None:
    folder = shutil.copytree(first, tmp_path / "copy")
    dependency = next((folder / "wheels").glob("dependency*"))
    original = dependency.read_bytes()
    dependency.write_bytes(original + b"x")
    assert "wheels/dependency-1.0-py3-none-any.whl" in refused(there.run(folder))
    dependency.write_bytes(original)
    (folder / "wheels" / "more.whl").write_bytes(b"")
    assert "wheels/more.whl" in refused(there.run(folder))
    (folder / "wheels" / "more.whl").unlink()
    (folder / "extra").symlink_to("/etc/passwd")
    assert "symbolic links" in refused(there.run(folder))
    assert not (there.prefix / "versions").exists()


def test_what_finder_adds_is_ignored(tmp_path: Path, first: Path, there: Installation) -> None:
    folder = shutil.copytree(first, tmp_path / "copy")
    dependency = next((folder / "wheels").glob("dependency*"))
    for name in (".DS_Store", "Icon\r", "wheels/.DS_Store", f"wheels/._{dependency.name}"):
        (folder / name).write_bytes(b"\0\5\x16\7")  # how AppleDouble files begin
    there.install(folder)
    assert there.version() == "1.0.0"


def test_a_mac_gets_the_mlx_that_is_built_for_its_system(
    tmp_path: Path, index: Index, there: Installation
) -> None:
    folder = index.unpacked(tmp_path, "1.0.0", platform=PLATFORMS["macos-arm64"])
    assert len(list((folder / "wheels").glob("mlx_metal-*"))) == 3
    step, outputs = "step: install MLX's build for this macOS", {}
    for version, system in {"14.5": 14, "15.7.1": 15, "26.1": 15, "26.2": 26, "27.0": 26}.items():
        programs = _stand_ins(tmp_path / version, {"sw_vers": version})
        outputs[version] = there.install(folder, programs=programs)
        (file,) = there.prefix.glob("current/lib/python*/site-packages/mlx/system.txt")
        assert (version, int(file.read_text())) == (version, system)
    assert [version for version, text in outputs.items() if step in text] == ["15.7.1", "26.2", "27.0"]  # fmt: skip
    assert [version for version, text in outputs.items() if "need macOS 26.2" in text] == ["26.1"]
    before = there.tree()
    assert "nothing to do" in there.install(folder, programs=tmp_path / "27.0")
    assert there.tree() == before


def test_a_download_loses_its_quarantine_only_after_its_files_were_checked(
    tmp_path: Path, index: Index, there: Installation
) -> None:
    folder = index.unpacked(tmp_path, "1.0.0", platform=PLATFORMS["macos-arm64"])
    programs = _stand_ins(tmp_path / "programs", {"sw_vers": "26.2"})
    marks = tmp_path / "marks"
    # xattr of macOS ends with 1 for a file without the attribute.
    write_programs(tmp_path / "more", {"xattr": f"""\
case "$*" in
  '-p com.apple.quarantine {folder}/bin/uv') cat '{marks}' ;;
  '-p com.apple.quarantine '*) exit 1 ;;
  '-dr com.apple.quarantine {folder}') [ -n "$(grep locked '{marks}')" ] || rm '{marks}' ;;
  *) exit 64 ;;
esac"""})  # fmt: skip
    (tmp_path / "more" / "xattr").rename(programs / "xattr")
    mark = "0083;6750c3a0;Safari;12AB34CD-0000-0000-0000-000000000000\n"
    (folder / "wheels" / "more.whl").write_bytes(b"")
    marks.write_text(mark)
    assert "wheels/more.whl" in refused(there.run(folder, programs=programs))
    assert marks.read_text() == mark
    (folder / "wheels" / "more.whl").unlink()
    marks.write_text(f"{mark}locked\n")
    assert f"sudo xattr -dr com.apple.quarantine '{folder}'" in refused(
        there.run(folder, programs=programs)
    )
    marks.write_text(mark)
    assert "step: remove com.apple.quarantine" in there.install(folder, programs=programs)
    assert not marks.exists()


def test_versions_share_the_etcd_of_their_archives(
    tmp_path: Path, index: Index, there: Installation
) -> None:
    source = write_etcd_release(tmp_path / "etcd.tgz", "3.6.5", PLATFORM)
    paths = set()
    for version in ("1.0.0", "1.1.0"):
        (tmp_path / version).mkdir()
        folder = index.unpacked(tmp_path / version, version, etcd_archive=source)
        assert "etcd=3.6.5\n" in (folder / "release.txt").read_text()
        there.install(folder)
        program = there.prefix / "current" / "bin" / "etcd"
        assert os.access(program, os.X_OK)
        paths.add(program.resolve())
    assert len(paths) == 1
    assert paths.pop().is_relative_to(there.prefix.resolve() / "etcd")
    assert there.run(there.prefix / "current", "--uninstall").returncode == 0
    assert not (there.prefix / "etcd").exists()


def test_other_files_of_an_installed_version_are_refused(
    tmp_path: Path, index: Index, first: Path, there: Installation
) -> None:
    there.install(first)
    other = index.unpacked(tmp_path, "1.0.0", code="pass")
    assert "another archive" in refused(there.run(other, "--python", sys.executable))


def test_uninstall_removes_all_but_what_is_not_ours(first: Path, there: Installation) -> None:
    foreign = there.prefix / "bin" / "fleetctl"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    assert "something else and stays" in there.install(first)
    assert there.run(there.prefix / "current", "--uninstall").returncode == 0
    assert [path.name for path in there.prefix.rglob("*")] == ["bin", "fleetctl"]
    assert foreign.read_text() == "mine"


def test_uninstall_is_refused_while_a_process_runs(first: Path, there: Installation) -> None:
    there.install(first)
    python = there.prefix / "current" / "bin" / "python"
    with subprocess.Popen([python, "-c", "input()"], stdin=subprocess.PIPE) as process:
        said = refused(there.run(there.prefix / "current", "--uninstall"))
        process.communicate(b"\n")
    assert "Stop them first" in said
    assert there.version() == "1.0.0"


def test_installations_exclude_each_other(first: Path, there: Installation) -> None:
    there.prefix.mkdir()
    lock = there.prefix / ".lock"
    lock.symlink_to(str(os.getpid()))
    assert f"another installation (process {os.getpid()})" in refused(there.run(first))
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock.unlink()
    lock.symlink_to(str(ended.pid))
    there.install(first)


@pytest.mark.full
def test_an_archive_with_a_python_needs_none_on_the_machine(
    tmp_path: Path, index: Index, there: Installation
) -> None:
    python = tmp_path / "python.tar.gz"
    with tarfile.open(python, "w:gz", compresslevel=1) as archive:
        archive.add(sys.base_prefix, "python", filter=_without_tests)
    programs = set()
    for version in ("1.0.0", "1.1.0"):
        (tmp_path / version).mkdir()
        folder = index.unpacked(tmp_path / version, version, python_archive=python)
        done = there.run(folder)
        assert done.returncode == 0, done.stderr
        assert there.version() == version
        programs.add((there.prefix / "current" / "bin" / "python").resolve())
    # The application firewall knows the program by this path, which an upgrade does not change.
    (program,) = programs
    assert program.is_relative_to(there.prefix.resolve() / "python")


def _without_tests(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    left_out = {"test", "tests", "site-packages", "__pycache__"}
    return None if left_out & set(Path(entry.name).parts) else entry


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        pytest.param({"uname -m": "x86_64"}, "needs Apple silicon", id="intel"),
        pytest.param(
            {"uname -m": "x86_64", "sysctl": "1"}, "Run: arch -arm64 /bin/sh", id="rosetta"
        ),
        pytest.param({"sw_vers": "13.7.1"}, "macOS 13.7.1; mlx needs macOS 14", id="old-macos"),
        pytest.param({"sw_vers": ""}, "which is no version", id="no-version"),
        pytest.param({"sw_vers": "26.2", "df": "1"}, "0 MiB free", id="full-disk"),
        pytest.param({"sw_vers": "26.2"}, "has no Python", id="good"),
        pytest.param({"uname -s": "Linux"}, "this archive is for macOS", id="linux"),
        pytest.param({"uname -s": "FreeBSD"}, "FreeBSD is not supported", id="other"),
    ],
)
def test_a_mac_is_checked_before_anything_is_changed(
    tmp_path: Path, first: Path, there: Installation, programs: dict[str, str], expected: str
) -> None:
    folder = shutil.copytree(first, tmp_path / "copy")
    _make_mac_archive(folder)
    path = _stand_ins(tmp_path / "stand-ins", programs)
    done = subprocess.run(
        there.command(folder),
        env={"PATH": f"{path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert expected in refused(done)
    assert not (there.prefix / "current").exists()


def _make_mac_archive(folder: Path) -> None:
    """Say that the archive is for Macs: its files are the same, and its list is of the changed ones."""
    release, listing = folder / "release.txt", folder / "SHA256SUMS"
    release.write_text(release.read_text().replace(PLATFORM.name, "macos-arm64"))
    listed = subprocess.run(
        ["sha256sum", "release.txt"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    lines = [line for line in listing.read_text().splitlines() if "release.txt" not in line]
    listing.write_text("\n".join([*lines, listed]))


def _stand_ins(folder: Path, programs: dict[str, str]) -> Path:
    """Write programs of a Mac with Apple silicon and macOS 15, changed as the test says."""
    answers = {"uname -s": "Darwin", "uname -m": "arm64", "sysctl": "0", "sw_vers": "15.1"}
    answers |= programs
    scripts = {
        "uname": f"case $1 in -s) echo {answers['uname -s']};; *) echo {answers['uname -m']};; esac",
        "sysctl": f'[ "$*" = "-n sysctl.proc_translated" ] && echo {answers["sysctl"]}',
        "sw_vers": f'[ "$*" = -productVersion ] && echo {answers["sw_vers"]}',
    }
    if "df" in programs:
        scripts["df"] = f"echo header; echo disk 9 9 {programs['df']} 9% /"
    return write_programs(folder, scripts)


def write_programs(folder: Path, scripts: dict[str, str]) -> Path:
    """Write shell scripts under these names."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--frefix", "/x"], "unknown option --frefix"),
        (["--prefix"], "--prefix needs a value"),
        (["--prefix", "x"], "x: give a full path"),
        (["--prefix", "/nowhere", "--use", "../x"], "expected a version"),
        (["--prefix", "/nowhere"], "not an unpacked archive"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: Sequence[str], expected: str) -> None:
    done = subprocess.run(
        [SCRIPT, *flags], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert expected in refused(done)


def test_the_python_must_fit_the_packages(tmp_path: Path, first: Path, there: Installation) -> None:
    path = write_programs(tmp_path / "pythons", {"python": "echo 3.9"})
    said = refused(there.run(first, "--python", str(path / "python")))
    assert f"is Python 3.9, and the packages of this archive are for {PYTHON}" in said
    assert "does not run" in refused(
        there.run(first, "--uv", "/bin/false", "--python", sys.executable)
    )
