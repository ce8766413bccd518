"""Files with secrets that other users may use are refused; a crash writes no memory to disk."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from machinery import process_secrets
from machinery.process_secrets import OpenSecretError, check_secret_file, read_secret_file

PROGRAMS = {
    "fleetctl": "from click.testing import CliRunner; from fleetctl.__main__ import main; " "CliRunner().invoke(main, ['help'])",
    "gateway": "import gateway.__main__ as m; m.main(['--etcd', 'wrong'], standalone_mode=False)",
    "reconciler": "import reconciler.__main__ as m; m.main(['--etcd', 'x'], standalone_mode=False)",
    "nodeagent": "import nodeagent.__main__ as m; " "m.main(['--etcd', 'wrong', '--state-dir', 'x'], standalone_mode=False)",
    "hollow": "import nodeagent.hollow.__main__ as m; m.main(['--etcd', 'x'], standalone_mode=False)",
    "engine": "import engine.__main__ as m; m.main(['--wrong'])",
    "golden": "import engine.golden.__main__ as m; m.run(['--wrong'])",
    "shape probe": "import engine.shape_probe as m; m.main()",
    "template check": "import engine.text.template_check as m; m.main()",
    "model inspection": "import models.inspection_process as m; m.main()",
    "fabric rank": "import nodeagent.fabric.__main__ as m; m.main(['--wrong'])",
    "fetch process": "import reconciler.services.gitops.fetch_process.__main__ as m; m.main()",
}  # fmt: skip
SHOWN = """
try:
    {code}
except BaseException:
    pass
print([line.split()[4:6] for line in open("/proc/self/limits") if line.startswith("Max core")])
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("s3cret\n")
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_read(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    assert read_secret_file(secret) == b"s3cret\n"
    check_secret_file(secret)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_use_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    for use in (read_secret_file, check_secret_file):
        with pytest.raises(OpenSecretError) as refused:
            use(secret)
        assert f"chmod 600 {secret}" in str(refused.value)
        assert f"{mode:04o}" in str(refused.value)
        assert "s3cret" not in str(refused.value)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file to another user")
def test_a_group_may_read_the_file_of_another_user(secret: Path) -> None:
    os.chown(secret, 12345, -1)
    secret.chmod(0o640)
    assert read_secret_file(secret) == b"s3cret\n"
    secret.chmod(0o660)
    with pytest.raises(OpenSecretError):
        read_secret_file(secret)


def test_a_pipe_has_no_mode_to_check() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"s3cret")
    os.close(writer)
    assert read_secret_file(Path(f"/dev/fd/{reader}")) == b"s3cret"
    os.close(reader)


def test_a_huge_file_is_no_secret(secret: Path) -> None:
    secret.write_bytes(bytes(process_secrets.MAX_FILE_BYTES + 1))
    with pytest.raises(OSError, match="larger than 64 KiB"):
        read_secret_file(secret)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.full
@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_a_crash_of_a_program_writes_no_memory_to_disk(code: str, tmp_path: Path) -> None:
    """Every program forbids core dumps before it does anything else."""
    given = [sys.executable, "-c", SHOWN.format(code=code)]
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    assert hard != 0, "the test needs a machine that allows core dumps"
    ended = subprocess.run(
        given, input="", capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert ended.stdout.splitlines()[-1] == "[['0', '0']]"
