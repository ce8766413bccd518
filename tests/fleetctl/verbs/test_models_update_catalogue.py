"""`fleetctl models update-catalogue`: only a newer catalogue with a good signature replaces the one of the release."""

import asyncio
import functools
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from fleetctl.catalogue_file import IDENTITY, NAMESPACE
from models.catalogue.catalogue import MAX_CATALOGUE_BYTES, shipped_catalogue
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.store_certificates import Authority

Signed = Callable[[bytes], Path]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Return a file of allowed signers; its private key is beside it."""
    key = tmp_path / "key"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=60
    )
    signers = tmp_path / "signers"
    signers.write_text(f'{IDENTITY} namespaces="{NAMESPACE}" {(tmp_path / "key.pub").read_text()}')
    return signers


@pytest.fixture
def signed(tmp_path: Path, keys: Path) -> Signed:
    """Return a function that signs content, and returns its path."""

    def sign(content: bytes, namespace: str = NAMESPACE) -> Path:
        path = tmp_path / "new.json"
        path.write_bytes(content)
        Path(f"{path}.sig").unlink(missing_ok=True)
        subprocess.run(
            ["ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", keys.with_name("key"), path],
            check=True, timeout=60,
        )  # fmt: skip
        return path

    return sign


def content(day: str) -> bytes:
    tree = json.loads(shipped_catalogue().model_dump_json(by_alias=True))
    name, model = next(item for item in tree["models"].items() if item[0] == "Qwen3-8B")
    return json.dumps(
        {"date": day, "models": {f"{name}-New": {**model, "repositories": {}}}}
    ).encode()


async def test_a_newer_signed_catalogue_is_used_and_an_older_one_is_refused(
    tmp_path: Path, keys: Path, signed: Signed
) -> None:
    config = ("--config", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("")
    update = (*config, "models", "update-catalogue")
    path = signed(content("2099-01-02"))
    done = await run_fleetctl(*update, str(path), "--allowed-signers", str(keys))
    assert done.code == 0, done.err
    found = await run_fleetctl(*config, "models", "search", "qwen3-8b", "-o", "json")
    assert [each["repo"] for each in json.loads(found.out)["models"]] == ["Qwen/Qwen3-8B-New"] * 2
    path = signed(content("2099-01-01"))
    done = await run_fleetctl(*update, str(path), "--allowed-signers", str(keys))
    assert done.code == 1
    assert "2099-01-02 is in use" in done.err
    # A file that was damaged later is not read, and the release answers.
    (tmp_path / "catalogue.json").write_text("{")
    found = await run_fleetctl(*config, "models", "search", "qwen3-8b", "4bit", "-o", "json")
    assert json.loads(found.out)["date"] == shipped_catalogue().date.isoformat()
    assert "is not read" in found.err


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes() + b" "), "signature", id="changed"
        ),
        pytest.param(lambda path: Path(f"{path}.sig").unlink(), "cannot read", id="unsigned"),
        pytest.param(
            lambda path: Path(f"{path}.sig").write_text("none"), "signature", id="no signature"
        ),
        pytest.param(
            lambda path: path.write_bytes(b" " * (MAX_CATALOGUE_BYTES + 1)), "bytes", id="too large"
        ),
    ],
)
async def test_what_was_changed_after_signing_is_refused(
    tmp_path: Path, keys: Path, signed: Signed, spoil: Callable[[Path], object], why: str
) -> None:
    path = signed(content("2099-01-01"))
    spoil(path)
    (tmp_path / "config.toml").write_text("")
    words = ("--config", str(tmp_path / "config.toml"), "models", "update-catalogue", str(path))
    done = await run_fleetctl(*words, "--allowed-signers", str(keys))
    assert done.code == 1
    assert why in done.err
    assert not (tmp_path / "catalogue.json").exists()


async def test_the_signature_of_a_release_and_malformed_content_are_refused(
    tmp_path: Path, keys: Path, signed: Signed
) -> None:
    (tmp_path / "config.toml").write_text("")
    words = ("--config", str(tmp_path / "config.toml"), "models", "update-catalogue")
    path = signed(content("2099-01-01"), "mlx-fleet-release")  # type: ignore[call-arg]
    assert (await run_fleetctl(*words, str(path), "--allowed-signers", str(keys))).code == 1
    path = signed(b'{"date": "2099-01-01", "models": {"x": {}}}')
    done = await run_fleetctl(*words, str(path), "--allowed-signers", str(keys))
    assert "models.x" in done.err
    done = await run_fleetctl(*words, str(signed(content("2099-01-01"))))
    assert "no key that signs catalogues" in done.err
    done = await run_fleetctl(
        *words, "http://127.0.0.1/catalogue.json", "--allowed-signers", str(keys)
    )
    assert "https://" in done.err


@contextmanager
def https_server(folder: Path, authority: Authority) -> Iterator[str]:
    """Serve a folder over https; yield the address."""
    identity = authority.issue("web")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity.certificate, identity.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.ci
async def test_an_address_is_fetched_over_verified_https(
    tmp_path: Path, keys: Path, signed: Signed
) -> None:
    path = signed(content("2099-01-01"))
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (MAX_CATALOGUE_BYTES + 1))
    (tmp_path / "config.toml").write_text("")
    authority = Authority(tmp_path, "authority")
    command = (
        sys.executable,
        "-m",
        "fleetctl",
        "--config",
        str(tmp_path / "config.toml"),
        "models",
    )

    async def update(address: str, **variables: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *(*command, "update-catalogue", address, "--allowed-signers", str(keys)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **variables},
        )  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    with https_server(tmp_path, authority) as address:
        trusted = {"SSL_CERT_FILE": str(authority.certificate)}
        answers = await asyncio.gather(
            update(f"{address}/{path.name}"),
            update(f"{address}/none.json", **trusted),
            update(f"{address}/{large.name}", **trusted),
        )
        for (code, output), why in zip(
            answers, ("cannot fetch", "answered 404", "more than"), strict=True
        ):
            assert code == 1
            assert why in output
        assert not (tmp_path / "catalogue.json").exists()
        assert await update(f"{address}/{path.name}", **trusted) == (
            0,
            f"the list of 2099-01-01 with 1 models is in use: {tmp_path / 'catalogue.json'}\n",
        )
