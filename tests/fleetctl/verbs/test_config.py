"""Contexts: the store that they select, and the verbs of `fleetctl config`."""

import asyncio
import json
import sys
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
from tests.support.fleet import Done, Fleet, fleetctl
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


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("contxts = 1", "unknown key contxts; did you mean contexts?"),
        ("current-context = 1", 'current-context: expected the name of a context, such as "home"'),
        ("contexts = 1", "contexts: expected a table per context: [contexts.NAME]"),
        ("contexts.a = 1", "context a: expected a table: [contexts.a]"),
        ("[contexts.a]\netdc = 'x'", "context a: unknown key etdc; did you mean etcd?"),
        ("[contexts.a]\netcd = 1", 'context a: etcd: expected URLs, such as ["http://mac-1:2379", "http://mac-2:2379"]'),
        ("[contexts.a]\netcd-user = 1", "context a: etcd-user: expected text in quotes, not 1"),
        ("[contexts.a]\netcd = 'unix:/x'\ndata-dir = 'y'", "context a: give either etcd or data-dir, because they name two stores"),
        ("[contexts.a", "Expected ']' at the end of a table declaration (at end of document)"),
    ],
)  # fmt: skip
async def test_an_invalid_file_is_refused(text: str, refusal: str, config: Path) -> None:
    config.write_text(text)
    done = await run_fleetctl("config", "get-contexts")
    assert done.code == 1
    assert done.err.startswith(f"error: {config}")
    assert done.err.endswith(f"{refusal}\n")


async def test_output_of_the_verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("FLEETCTL_CONFIG", str(path))

    async def config(*words: str) -> Done:
        return await run_fleetctl("config", *words)

    assert (await config("get-contexts")).err == f"no contexts in {path}\n"
    refused = await config("current-context")
    assert (refused.code, refused.err) == (
        1,
        f"error: current-context is not set in {path}. Set it with `fleetctl config use-context NAME`\n",
    )
    refused = await run_fleetctl("get", "md", "--context", "lab")
    assert refused.err == (
        f"error: there is no context 'lab': {path} has none. Create one with `fleetctl config set-context lab --etcd URL`\n"
    )
    made = await config(
        "set-context", "lab", "--etcd", "http://m1:2379,http://m2:2379", "--etcd-prefix", "/lab"
    )
    assert made.out == 'Context "lab" created.\n'
    assert (await config("set-context", "home", "--data-dir", str(tmp_path))).code == 0
    assert (await config("use-context", "lab")).out == 'Switched to context "lab".\n'
    assert (
        await config("set-context", "--current", "--gateway", "http://m1:4000")
    ).out == 'Context "lab" modified.\n'
    assert [line.split() for line in (await config("get-contexts")).out.splitlines()] == [
        ["CURRENT", "NAME", "STORE", "STATE", "USER", "GATEWAY"],
        ["home", str(tmp_path), "down"],
        ["*", "lab", "http://m1:2379,http://m2:2379", "/lab", "-", "http://m1:4000"],
    ]
    (tmp_path / "lock").touch()
    with DataDir(tmp_path).lock():
        assert (await config("get-contexts", "home")).out.split()[-2:] == [str(tmp_path), "running"]
    assert (await config("set-context", "gone", "--data-dir", str(tmp_path / "gone"))).code == 0
    assert (await config("get-contexts", "gone")).out.split()[-1] == "deleted"
    assert (await config("delete-context", "gone")).code == 0
    assert (await config("get-contexts", "-o", "name")).out == "home\nlab\n"
    assert (
        await config("rename-context", "lab", "study")
    ).out == 'Context "lab" renamed to "study".\n'
    assert (await config("current-context")).out == "study\n"
    shown = await config("view", "--minify", "-o", "json")
    assert json.loads(shown.out) == {
        "current-context": "study",
        "contexts": {
            "study": {
                "etcd": ["http://m1:2379", "http://m2:2379"],
                "etcd-prefix": "/lab",
                "gateway": ["http://m1:4000"],
            }
        },
    }  # fmt: skip
    gone = await config("delete-context", "study")
    assert gone.out == f"deleted context study from {path}\n"
    assert gone.err.startswith("warning: it was the current context, and no other takes its place")
    # The local fleet does not take its place.
    assert (await run_fleetctl("get", "md", "--context", "home")).code == 1
    monkeypatch.delenv("FLEET_DATA_DIR")
    refused = await run_fleetctl("get", "md")
    assert refused.err == (
        f"error: current-context in {path} is 'study', which no longer exists; contexts: home. "
        "Select another one with `fleetctl config use-context NAME`, or none with `fleetctl config unset "
        "current-context`\n"
    )
    # With a store in the environment, neither the context nor a readable file is needed.
    monkeypatch.setenv("FLEET_DATA_DIR", str(tmp_path / "empty"))
    assert f"no fleet runs in {tmp_path}/empty. " in (await run_fleetctl("get", "md")).err
    assert (await config("unset", "current-context")).out == 'Property "current-context" unset.\n'
    assert "current-context" not in path.read_text()
    assert (path.stat().st_mode & 0o777) == 0o600


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("set-context",), "give either the context's name or --current"),
        (("set-context", "a", "--etcd", "mac-1:2379"), "write http://HOST:PORT, https://HOST:PORT or unix:PATH"),
        (("set-context", "a", "--etcd", "http://m:1", "--data-dir", "x"), "they name two stores"),
        (("set-context", "a", "--etcd-ca", "/nowhere"), "--etcd-ca: the file /nowhere does not exist"),
        (("set-context", "a", "--identity-dir", "/nowhere"), "--identity-dir: /nowhere holds no identity.pem"),
        (("set-context", "a", "--gateway", "m:1"), "--gateway m:1: expected http://HOST:PORT"),
        (("set-context", "a", "--etcd-transport", "x"), "--etcd-transport x: expected grpc or http"),
        (("set-context", "a b"), "context 'a b': use only letters, digits"),
        (("rename-context", "lab", "home"), "context 'home' already exists"),
        (("use-context", "laab"), "there is no context 'laab'"),
    ],
)  # fmt: skip
async def test_refusals_change_nothing(words: tuple[str, ...], refusal: str, config: Path) -> None:
    done = await run_fleetctl("config", *words)
    assert done.code in (1, 2)
    assert refusal in done.err
    assert config.read_text() == LAB


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


async def test_the_file_of_config_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETCTL_CONFIG", str(tmp_path / "other.toml"))
    path = tmp_path / "new" / "config.toml"
    for words in (("get", "md"), ("config", "get-contexts")):
        done = await run_fleetctl("--config", str(path), *words)
        assert (done.code, done.err) == (
            1,
            f"error: --config: the file {path} does not exist. Create it with `fleetctl --config {path} config set-context "
            "NAME`, or remove --config\n",
        )
    made = ("--config", str(path), "config", "set-context", "a", "--etcd", "http://m:1")
    refused = await run_fleetctl(*made)
    assert refused.err == (
        f"error: the folder {path.parent} for config.toml does not exist; create it first\n"
    )
    assert not path.parent.exists()
    path.parent.mkdir()
    assert (await run_fleetctl(*made)).out == 'Context "a" created.\n'


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
