"""Support bundles: their contents, and the redaction of secrets."""

import io
import json
import tarfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetctl.support_bundle.contents import LOG_BYTES, BundleArchive
from machinery import redaction
from tests.support.fleet import fleetctl
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.sampling import samples

NOW = datetime(2026, 11, 22, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("FLEET_ETCD_PASSWORD=hunter22", "FLEET_ETCD_PASSWORD=<redacted>"),
        ('"etcdPassword": "hun ter"', '"etcdPassword": <redacted>'),
        ("authorization: Bearer abc.def-ghi", "authorization: <redacted> <redacted>"),
        ("Basic dXNlcjpwYXNz", "Basic <redacted>"),
        ("key sk-fleet-0123456789abcdef", "key <redacted>"),
        ("ghp_0123456789abcdefghij and hf_0123456789abcdefghij", "<redacted> and <redacted>"),
        ("https://anna:hunter2@git.example/x.git", "https://<redacted>@git.example/x.git"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----", "<redacted>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc", "<redacted>"),
        ("cannot read /Users/anna/models/x: gone", "cannot read ~/models/x: gone"),
        ("in /home/anna", "in ~"),
        ("in /root/.cache, /var/root/x", "in ~/.cache, ~/x"),
        ("mail anna.b@lab.example now", "mail <mail> now"),
        # Harmless text that looks similar.
        ("maxTokens: 4096, tokens=12, token: 5", "maxTokens: 4096, tokens=12, token: 5"),
        ("/srv/home/x and /rooted/y", "/srv/home/x and /rooted/y"),
        ("etcd at http://10.0.0.5:2379", "etcd at http://10.0.0.5:2379"),
        ('fleet_tokens_total{node="mac-1"} 12', 'fleet_tokens_total{node="mac-1"} 12'),
    ],
)  # fmt: skip
def test_redaction_of_text(before: str, after: str) -> None:
    assert redaction.redact_text(before) == after


@pytest.mark.parametrize("piece", ["a-", "a.", "a+", "aA", "eyJ.a", "a@a-", 'token:"', "a://"])
def test_a_hostile_line_of_a_log_takes_no_quadratic_time(piece: str) -> None:
    """4,000 times `a-` took 18 s; an agent gives 2 MiB of a log."""
    line = piece * 50_000
    began_s = time.process_time()
    redaction.redact_log(f'{line}\n{{"{line}": "x"}}\n')
    assert time.process_time() - began_s < 10


def test_redaction_of_trees() -> None:
    found = {
        "spec": {
            "credentials": {"username": "anna", "passwordFile": "git-token", "password": "hunter2"},
            "contextLength": 4096,
            "concurrency": 4,
        },
        "prompt": "what people asked",
        "messages": [{"role": "user", "content": "more of it"}],
        "message": "0 of 1 replicas ready",
        "token": 5,
        "apiKey": ["a", "b"],
    }
    assert redaction.redact_tree(found) == {
        "spec": {
            "credentials": {"username": "<redacted>", "passwordFile": "git-token", "password": "<redacted>"},
            "contextLength": 4096,
            "concurrency": 4,
        },
        "prompt": "<redacted>",
        "messages": "<redacted>",
        "message": "0 of 1 replicas ready",
        "token": 5,
        "apiKey": "<redacted>",
    }  # fmt: skip


def test_embedded_json_stays_valid() -> None:
    said = {
        "spec.credentials": {"username": "anna", "password": "hun ter"},
        "sk-fleet-0123456789": [1],
    }
    found = {"managedFields": [{"manager": "fleetctl", "applied": json.dumps(said)}]}
    (entry,) = redaction.redact_tree(found)["managedFields"]
    assert json.loads(entry["applied"]) == {
        "spec.credentials": {"username": "<redacted>", "password": "<redacted>"},
        "<redacted>": [1],
    }
    assert (
        redaction.redact_tree({"note": '{"password": "hunter2", '})["note"]
        == '{"password": <redacted>, '
    )


def test_redaction_of_logs() -> None:
    log = '{"message": "asked", "prompt": "my secret wish", "path": "/Users/anna/x"}\nplain token=abc\n{"broken\n'
    assert redaction.redact_log(log) == (
        '{"message": "asked", "prompt": "<redacted>", "path": "~/x"}\nplain token=<redacted>\n{"broken\n'
    )


SECRET = "Zq9-hunter2-secret"
_PLACES = (
    "password={}", "FLEET_ETCD_PASSWORD={}", '"secret": "{}"', "authorization: Bearer {}", "token: '{}'",
    "https://u:{}@host/x", "sk-fleet-{}", "-----BEGIN EC PRIVATE KEY-----\n{}\n-----END EC PRIVATE KEY-----",
)  # fmt: skip


# Values that a JSON file can contain.
_LETTERS = st.characters(codec="utf-8")


@given(
    before=st.text(alphabet=_LETTERS, max_size=40),
    place=st.sampled_from(_PLACES),
    after=st.text(alphabet=_LETTERS, max_size=40),
)
@settings(max_examples=samples(100))
def test_a_secret_is_redacted_in_any_context(before: str, place: str, after: str) -> None:
    planted = f"{before} {place.format(SECRET)} {after}"
    assert SECRET not in redaction.redact_text(planted)
    assert SECRET not in redaction.redact_log(f"{planted}\n")
    assert SECRET not in json.dumps(redaction.redact_tree({"a": [{"b": planted}]}))


@given(st.text(max_size=200))
@settings(max_examples=samples(100))
def test_redaction_is_idempotent(found: str) -> None:
    once = redaction.redact_text(found)
    assert redaction.redact_text(once) == once


def test_a_bundle_stays_below_its_size_limit() -> None:
    file = io.BytesIO()
    archive = BundleArchive(file, "bundle", NOW, limit_bytes=LOG_BYTES + 1000)
    archive.add_log(
        "a.log", b"first\n" + b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * (LOG_BYTES // 100)
    )
    archive.add_text("b.txt", "z" * 2000)
    archive.add_tree("c.json", {"a": 1})
    archive.finish()
    files = read(file.getvalue())
    assert set(files) == {"README.txt", "a.log", "c.json"}
    assert b"first" not in files["a.log"]
    assert len(files["a.log"]) <= LOG_BYTES
    readme = files["README.txt"].decode()
    assert "a.log  (the last 2.0 MiB)" in readme
    assert "b.txt: left out, because the bundle would exceed --max-size" in readme


def read(raw: bytes) -> dict[str, bytes]:
    """Return the files of a bundle by their names below its folder."""
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            assert member.mode == 0o600
            found[member.name.partition("/")[2]] = content.read()
    return found


MANIFEST = """apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: bundled, annotations: {note: "password=Zq9-hunter2-secret"}}
spec: {model: {path: /Users/anna/models/x}}
"""


async def bundle(fleet: MemoryFleet, path: Path, *words: str) -> Any:
    return await fleet.ctl("support-bundle", "-o", str(path), *words)


async def test_a_bundle_of_a_store(shared_fleet: MemoryFleet, tmp_path: Path) -> None:
    await shared_fleet.applied(MANIFEST)
    key = await shared_fleet.ctl("create", "apikey", "phone")
    assert key.code == 0, key.err
    path = tmp_path / "bundle.tar.gz"
    done = await bundle(shared_fleet, path)
    assert done.code == 0, done.err
    assert done.out.startswith(f"{path}: ")
    assert (path.stat().st_mode & 0o777) == 0o600
    files = read(path.read_bytes())
    assert set(files) >= {
        "README.txt",
        "doctor.json",
        "versions.json",
        "keys.txt",
        "objects/modeldeployments.json",
    }
    whole = b"".join(files.values())
    for secret in (SECRET, "anna", "phone", key.out.split()[-1]):
        assert secret.encode() not in whole
    (deployment,) = json.loads(files["objects/modeldeployments.json"])
    assert deployment["spec"]["model"]["path"] == "~/models/x"
    (entry,) = deployment["metadata"]["managedFields"]
    assert json.loads(entry["applied"])
    again = await bundle(shared_fleet, path)
    assert (again.code, again.err) == (
        1,
        f"error: {path} already exists; use --force to overwrite it\n",
    )
    assert (await bundle(shared_fleet, path, "--force", "--no-logs")).code == 0


async def test_a_bundle_without_a_store(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    done = await fleetctl("support-bundle", "--etcd", "http://127.0.0.1:1", "-o", str(path))
    assert done.code == 0
    assert "warning: missing: all objects in the store" in done.err
    assert set(read(path.read_bytes())) == {"README.txt", "doctor.json"}
