"""The scripts that make a release and try it: what they refuse, and the commands that they use."""

import hashlib
import io
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.command_lines import problems

PACKAGING = Path(__file__).parent.parent / "packaging"


def run(
    script: str, *words: str | Path, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of packaging/ in an environment of its own."""
    return subprocess.run(
        [PACKAGING / script, *words],
        input=stdin,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )


def new_key(folder: Path, name: str) -> str:
    """Make a key pair; return the line of its public key for a file of allowed signers."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=60
    )
    public = (folder / f"{name}.pub").read_text()
    return f'release@mlx-fleet namespaces="mlx-fleet-release" {public}'


def test_a_signature_is_one_that_strangers_can_verify(tmp_path: Path) -> None:
    release = tmp_path / "release"
    release.mkdir()
    (release / "SHA256SUMS").write_text("00  x\n")
    signers = tmp_path / "signers"
    signers.write_text(new_key(tmp_path, "known"))
    new_key(tmp_path, "other")
    signature = release / "SHA256SUMS.sig"
    done = run("sign.sh", release, signers, stdin=(tmp_path / "known").read_text())
    assert (done.returncode, signature.is_file()) == (0, True), done.stderr
    for key, reason in (
        ((tmp_path / "other").read_text(), "strangers could not verify"),
        ("no key", "is not a private key of OpenSSH"),
    ):
        done = run("sign.sh", release, signers, stdin=key)
        assert done.returncode == 1
        assert reason in done.stderr
    assert not signature.exists()


def test_a_part_with_another_hash_is_not_used(tmp_path: Path) -> None:
    original = tmp_path / "etcd.zip"
    original.write_text("etcd")
    parts = tmp_path / "list"
    digest = hashlib.sha256(b"etcd").hexdigest()
    parts.write_text(f"# a comment\nmacos-arm64 etcd {digest} {original.as_uri()}\n")
    folder = tmp_path / "parts"

    def download(*platforms: str) -> subprocess.CompletedProcess[str]:
        return run("parts.sh", folder, *platforms, PARTS_LIST=str(parts))

    assert download("linux-x86_64").stdout == ""
    assert "download" in download().stdout
    assert (folder / "macos-arm64-etcd.zip").read_text() == "etcd"
    assert "download" not in download("macos-arm64").stdout  # it is there
    (folder / "macos-arm64-etcd.zip").write_text("changed")
    original.write_text("another")
    done = download()
    assert (done.returncode, "Do not use it" in done.stderr) == (1, True)
    assert not (folder / "macos-arm64-etcd.zip").exists()
    original.unlink()
    assert "cannot be downloaded" in download().stderr


@pytest.mark.parametrize(
    ("tag", "commit", "members", "refusal"),
    [
        pytest.param("v1.2.3", "0123ab", ("python.tar.gz", "etcd.tar.gz"), "", id="complete"),
        pytest.param("v1.2.4", "0123ab", (), "set project.version", id="version"),
        pytest.param("v1.2.3", "0123ab-dirty", (), "not from the tag as it is", id="changed"),
        pytest.param("v1.2.3", "0123ab", ("python.tar.gz",), "has no etcd", id="no-etcd"),
        pytest.param("v1.2.3", "0123ab", ("etcd.tar.gz",), "has no python", id="no-python"),
    ],
)
def test_a_tag_needs_a_complete_release_of_its_version(
    tag: str, commit: str, members: tuple[str, ...], refusal: str, tmp_path: Path
) -> None:
    for name in ("mlx_fleet-1.2.3-py3-none-any.whl", "mlx-fleet-1.2.3.cdx.json"):
        (tmp_path / name).touch()
    release = f"version=1.2.3\ncommit={commit}\n".encode()
    with tarfile.open(tmp_path / "mlx-fleet-1.2.3-macos-arm64.tar", "w") as archive:
        for name in ("release.txt", *members):
            member = tarfile.TarInfo(f"mlx-fleet-1.2.3-macos-arm64/{name}")
            member.size = len(release)
            archive.addfile(member, io.BytesIO(release))
    done = run("tag_check.sh", tmp_path, tag)
    assert done.returncode == (1 if refusal else 0), done.stderr
    assert refusal in done.stderr


def test_commands_for_the_mac_exist() -> None:
    """The script runs on Macs only."""
    text = (PACKAGING / "check_mac.sh").read_text()
    array = re.search(r"(?m)^over_ssh=\((.*)\)$", text)
    assert array is not None
    text = text.replace('"${over_ssh[@]}"', array[1])
    lines = re.findall(r"(?m)^ *(?:if |sudo )?(?:fleetctl|mlx-fleet) .*", text)
    commands = [re.split(r" (?:[|&>2]|then)", line, maxsplit=1)[0] for line in lines]
    cleaned = [re.sub(r"^.*?(?:fleetctl|mlx-fleet) ", "fleetctl ", line) for line in commands]
    wrong = [
        f"{line}: {word}" for line in cleaned for word in problems(line.rstrip(";"), is_whole=True)
    ]
    assert wrong == []
    assert len(cleaned) > 12
