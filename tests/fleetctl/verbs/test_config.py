"""Contexts: the store that they select, and the verbs of `fleetctl config`."""

import asyncio
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fleetctl.cli import contexts
from fleetctl.cli.connect import (
    Command,
    cluster_options,
    data_dir_option,
    gateway_options,
    store_options,
)
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import DataDir
from fleetctl.verbs import config as verbs_config
from tests.support.fleet import Fleet, fleetctl
from tests.support.fleetctl_runner import run_fleetctl

LAB = """# our fleets
current-context = "home"

[contexts.home]
data-dir = "fleet"  # beside this file

[contexts.lab]
etcd = ["http://mac-1:2379", "http://mac-2:2379"]
etcd-prefix = "/lab"
etcd-password-file = "admin.env"
gateway = "http://mac-1:4000"
api-key-file = "key"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a configuration file that the test's commands use."""
    path = tmp_path / "fleets" / "config.toml"
    path.parent.mkdir()
    path.write_text(LAB)
    for name in ("admin.env", "key"):
        (path.parent / name).write_text("secret\n")
        (path.parent / name).chmod(0o600)
    monkeypatch.setenv("FLEETCTL_CONFIG", str(path))
    monkeypatch.delenv("FLEET_DATA_DIR")
    return path


def settled(
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    environ: dict[str, str] | None = None,
    options: Command = gateway_options,
) -> dict[str, Any]:
    """Return the options that a command with these flags gets."""
    got: dict[str, Any] = {}

    @click.group()
    @click.option("--context", envvar="FLEETCTL_CONTEXT")
    @click.option("--config", envvar="FLEETCTL_CONFIG")
    def main(context: str | None, config: str | None) -> None:
        del context, config

    @main.command()
    @options
    def look(**options: Any) -> None:
        got.update(options)

    for name, value in (environ or {}).items():
        monkeypatch.setenv(name, value)
    before = words[: words.index("--")] if "--" in words else ()
    after = words[len(before) + 1 :] if "--" in words else words
    result = CliRunner().invoke(main, [*before, "look", *after])
    if result.exit_code:
        raise FleetctlError(result.output)
    return got


@pytest.mark.parametrize(
    ("words", "environ", "store"),
    [
        pytest.param((), {}, "fleet", id="current"),
        pytest.param(("--context", "lab"), {}, "mac-1", id="flag"),
        pytest.param(("--context", "lab", "--"), {}, "mac-1", id="flag-before-the-verb"),
        pytest.param(("--context", "lab", "--", "--context", "home"), {}, "fleet", id="the-verbs-own-wins"),
        pytest.param((), {"FLEETCTL_CONTEXT": "lab"}, "mac-1", id="environment"),
        pytest.param((), {"FLEET_ETCD": "http://other:1"}, "other", id="etcd-in-the-environment"),
        pytest.param(("--context", "lab"), {"FLEET_ETCD": "http://other:1"}, "mac-1", id="a-flag-is-stronger"),
        pytest.param(("--context", "home"), {"FLEET_ETCD": "http://other:1"}, "fleet", id="for-folders-too"),
        pytest.param(("--etcd", "http://flag:1", "--context", "lab"), {}, "flag", id="etcd-flag"),
        pytest.param(("--data-dir", "here"), {"FLEETCTL_CONTEXT": "lab"}, "here", id="folder-flag"),
        pytest.param((), {"FLEET_DATA_DIR": "/there"}, "there", id="folder-in-the-environment"),
        pytest.param((), {"FLEET_ETCD": "http://other:1", "FLEETCTL_CONTEXT": "gone"}, "other", id="not-even-looked-at"),
    ],
)  # fmt: skip
def test_flags_then_environment_then_context_select_the_store(
    words: tuple[str, ...],
    environ: dict[str, str],
    store: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got = settled(monkeypatch, *words, environ=environ)
    place = got["etcd"][0] if got["etcd"] else got["data_dir"].name
    assert store in str(place)
    # A context is used completely or not at all: its password and key must not reach another store or gateway.
    is_lab = store == "mac-1"
    assert got["etcd_prefix"] == ("/lab" if is_lab else "")
    assert got["etcd_password_file"] == (config.parent / "admin.env" if is_lab else None)
    assert got["api_key_file"] == (config.parent / "key" if is_lab else None)
    assert got["gateway"] == (("http://mac-1:4000",) if is_lab else ())


def test_single_settings_can_be_overridden(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = settled(monkeypatch, "--context", "lab", "--etcd-prefix", "/other")
    assert (got["etcd_prefix"], got["etcd"][1]) == ("/other", "http://mac-2:2379")
    monkeypatch.setenv("FLEET_ETCD_PASSWORD", "from-the-environment")
    # With --context, variables of the environment belong to another store and are ignored.
    got = settled(monkeypatch, "--context", "lab")
    assert (got["etcd_password"], got["etcd_password_file"]) == ("", config.parent / "admin.env")
    got = settled(monkeypatch, environ={"FLEETCTL_CONTEXT": "lab"})
    assert (got["etcd_password"], got["etcd_password_file"]) == ("from-the-environment", None)


def test_local_verbs_need_a_data_folder(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = settled(monkeypatch, options=data_dir_option)
    assert got == {"data_dir": config.parent / "fleet"}
    got = settled(monkeypatch, "--data-dir", "here", "--context", "lab", options=data_dir_option)
    assert got == {"data_dir": Path("here")}
    with pytest.raises(
        FleetctlError, match="works on a data folder of this machine, but context lab in"
    ):
        settled(monkeypatch, "--context", "lab", options=data_dir_option)
    got = settled(monkeypatch, "--context", "lab", options=cluster_options)
    assert got["etcd"] == ("http://mac-1:2379", "http://mac-2:2379")


def test_errors_name_file_context_and_key(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (config.parent / "admin.env").unlink()
    with pytest.raises(FleetctlError) as caught:
        settled(monkeypatch, "--context", "lab", options=store_options)
    assert str(caught.value) == (
        f"error: {config}: context lab: etcd-password-file: File '{config.parent}/admin.env' does not exist.\n"
    )
    # With another store on the command line, the context is not used.
    assert settled(monkeypatch, "--etcd", "http://x:1")["etcd"] == ("http://x:1",)
    with pytest.raises(FleetctlError, match=r"no context 'lap' in .*; did you mean lab\?"):
        settled(monkeypatch, "--context", "lap")


async def test_a_local_fleet_runs_is_down_or_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("FLEETCTL_CONFIG", str(path))
    for name, folder in (("home", tmp_path), ("gone", tmp_path / "gone")):
        words = ("config", "set-context", name, "--data-dir", str(folder))
        assert (await run_fleetctl(*words)).code == 0
    assert path.stat().st_mode & 0o777 == 0o600

    async def states() -> list[str]:
        rows = (await run_fleetctl("config", "get-contexts")).out.splitlines()[1:]
        return [row.split()[-1] for row in rows]

    assert await states() == ["deleted", "down"]
    (tmp_path / "lock").touch()
    with DataDir(tmp_path).lock():
        assert await states() == ["deleted", "running"]
    path.write_text(f'current-context = "study"\n{path.read_text()}')
    monkeypatch.delenv("FLEET_DATA_DIR")
    # The local fleet does not take the place of a context that is gone.
    refused = await run_fleetctl("get", "md")
    assert "'study', which no longer exists; contexts: gone, home. Select another" in refused.err
    # With a store in the environment, no context is needed.
    monkeypatch.setenv("FLEET_DATA_DIR", str(tmp_path / "empty"))
    assert f"no fleet runs in {tmp_path}/empty. " in (await run_fleetctl("get", "md")).err
    # Its supervisor runs, and etcd cannot start, such as on a full disk.
    monkeypatch.setenv("FLEET_DATA_DIR", str(tmp_path))
    socket_path = tmp_path / "etcd" / "sock" / "client:1"
    socket_path.parent.mkdir(parents=True)
    with DataDir(tmp_path).lock():
        for is_there in (False, True):
            if is_there:
                with closing(socket.socket(socket.AF_UNIX)) as listener:
                    listener.bind(str(socket_path))
            refused = await run_fleetctl("get", "md")
            assert f"the fleet in {tmp_path} runs, but its etcd does not. " in refused.err
            assert "Is the fleet up?" not in refused.err


def test_changes_keep_comments_and_order(config: Path, tmp_path: Path) -> None:
    linked = tmp_path / "link.toml"
    linked.symlink_to(config)
    verbs_config.edit_file(
        linked,
        lambda document: verbs_config.put_settings(
            document, "lab", {"gateway": "http://mac-9:4000"}
        ),
    )
    verbs_config.edit_file(
        linked,
        lambda document: verbs_config.put_settings(
            document, "home", {"etcd": ("http://mac-3:2379",)}
        ),
    )
    text = config.read_text()
    assert linked.is_symlink()
    assert text == LAB.replace(
        'gateway = "http://mac-1:4000"', 'gateway = "http://mac-9:4000"'
    ).replace('data-dir = "fleet"  # beside this file', 'etcd = ["http://mac-3:2379"]')


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    assert contexts.absolute(tmp_path / "config.toml", "ca.pem") == tmp_path / "ca.pem"
    assert contexts.absolute(tmp_path / "config.toml", "~/ca.pem") == Path.home() / "ca.pem"


def test_names_are_quoted_and_escaped(tmp_path: Path) -> None:
    known = contexts.Configuration(path=tmp_path, current="", contexts={"a": {}})
    assert contexts.missing_text(known, "x\\y").startswith("there is no context 'x\\y' in")
    assert contexts.missing_text(known, "x\x1b[1m").startswith("there is no context 'x\\x1b[1m' in")


async def test_a_context_selects_its_store(
    shared: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETCTL_CONFIG", str(tmp_path / "config.toml"))
    await fleetctl("config", "set-context", "here", "--etcd", str(shared.etcd.address))
    manifest = "apiVersion: fleet/v1alpha1\nkind: NodePool\nmetadata: {name: in-context}\nspec: {selector: {matchLabels: {a: b}}}\n"
    done = await fleetctl("apply", "-f", "-", "--context", "here", stdin=manifest.encode())
    assert done.out == "nodepool/in-context created\n", done.err
    assert (
        await fleetctl("--context", "here", "get", "np", "-o", "name")
    ).out == "nodepool/in-context\n"


async def test_config_imports_nothing_slow(tmp_path: Path) -> None:
    """It reads one file: prompts of shells run it."""
    file = tmp_path / "config.toml"
    file.write_text('current-context = "a"\n[contexts.a]\ndata-dir = "/nowhere"\n')
    code = (
        "import sys\n"
        "from fleetctl.__main__ import main\n"
        "main(standalone_mode=False)\n"
        "heavy = ('asyncio', 'pydantic', 'grpc', 'aiohttp', 'ssl', 'ruamel', 'cryptography')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    words = ("--config", str(file), "config", "get-contexts", "-o", "name")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *words), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert out == b"a\n[]\n"
