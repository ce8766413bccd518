"""Every `--flag` that a message, a docstring or a page names exists: a reader types what stands there."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

from dashboard.__main__ import main as dashboard
from fleetctl.__main__ import main as fleetctl
from gateway.__main__ import main as gateway
from identity.etcd_proxy import main as etcd_proxy
from nodeagent.__main__ import main as nodeagent
from nodeagent.hollow.__main__ import main as hollow
from reconciler.__main__ import main as reconciler
from tests.support.syntax import nodes

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("engine", "fleetctl", "gateway", "machinery", "manifests"),
    *("identity", "models", "nodeagent", "reconciler", "schemas", "store"),
)
PROGRAMS: Mapping[str, click.Command] = {
    "fleetctl": fleetctl,
    "fleet-gateway": gateway,
    "fleet-nodeagent": nodeagent,
    "fleet-reconciler": reconciler,
    "fleet-dashboard": dashboard,
    "nodeagent.hollow": hollow,
    "identity.etcd_proxy": etcd_proxy,
}
# Flags of other programs that messages and pages name, and of parts that no person starts.
FOREIGN: Mapping[str, str] = {
    "etcd": "advertise-client-urls auth-token auth-token-ttl auto-compaction-mode auto-compaction-retention cert-file "
    "client-cert-auth enable-grpc-gateway experimental-watch-progress-notify-interval initial-advertise-peer-urls "
    "initial-cluster initial-cluster-state initial-cluster-token key-file listen-client-urls listen-peer-urls "
    "log-outputs logger peer-cert-file peer-client-cert-auth peer-key-file peer-trusted-ca-file quota-backend-bytes "
    "snapshot-count trusted-ca-file watch-progress-notify-interval",
    "socketfilterfw": "add getblockall getglobalstate listapps remove setblockall unblockapp",
    "llama-gguf-split": "merge",
    "log": "last predicate style",
    "promtool": "syntax-only",
    "pytest": "update-golden",
    "systemctl": "property",
    "useradd": "home-dir no-create-home shell system user-group",
    "etcdctl": "keys-only learner peer-urls prefix",
    "mlx.distributed_config": "hosts over backend",
    "scutil": "get",
    "local-ai": "p2p",
    "opencode": "continue",
    "mlx.launch": "cwd",
    "tailscale": "json",
    "LocalAI": "models-config-file",
    "aider": "message model-metadata-file openai-api-base openai-api-key restore-chat-history",
    "hf": "local-dir",
    "lm_eval": "model tasks",
    "mlx_lm.convert": "hf-path mlx-path q-bits",
    "xcode-select": "install",
    "kubectl": "all-namespaces kustomize namespace server-side",
    "flux": "with-source",
    "curl": "cacert unix-socket",
    "install.sh": "keep-current link-dir list prefix python uninstall use uv",
    "pip": "dest disable-pip-version-check hash implementation no-deps only-binary python-version quiet requirement",
    "uv": "dry-run generate-hashes no-config python-platform require-hashes target",
    "python -m engine": "config",
    "python -m nodeagent.fabric": "bytes coordinator devices rank set size",
}
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w>])")
# A transition in a drawing: `open --its time is over--> half open`.
_ARROW = re.compile(r"--[\w ]+-->")
# A program with what follows in the same code span or line.
_CALL = re.compile(r"(?<![\w/.-])(fleetctl|fleet-(?:gateway|nodeagent|reconciler)) ([^`\n|;#]*)")


def flags_of(command: click.Command) -> set[str]:
    """Return the flags of a command and of the commands below it."""
    flags = {
        "--help",
        *(name for param in command.params for name in (*param.opts, *param.secondary_opts)),
    }
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            flags |= flags_of(inner) if inner is not None else set()
    return flags


def texts() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every page and of every string in production code."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        yield str(path.relative_to(ROOT)), path.read_text()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in nodes(path):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


@pytest.fixture(scope="module")
def everything() -> list[tuple[str, str]]:
    return list(texts())


def test_every_named_flag_exists_in_some_program(everything: list[tuple[str, str]]) -> None:
    known = {f"--{name}" for listed in FOREIGN.values() for name in listed.split()}
    for command in PROGRAMS.values():
        known |= flags_of(command)
    unknown = [
        f"{where}: {flag}"
        for where, text in everything
        for flag in _FLAG.findall(_ARROW.sub(" ", text))
        if flag not in known
    ]
    assert unknown == []


def test_a_flag_after_a_program_belongs_to_it(everything: list[tuple[str, str]]) -> None:
    wrong = [
        f"{where}: {program} {flag}"
        for where, text in everything
        for program, rest in _CALL.findall(text)
        # After " -- " stand the flags of a program that it starts.
        for flag in _FLAG.findall(rest.partition(" -- ")[0])
        if flag not in _flags_of_call(program, rest)
    ]
    assert wrong == []


def _flags_of_call(program: str, rest: str) -> set[str]:
    """Return the flags that may follow: those of the program, or of the verb of fleetctl that is named first."""
    command = PROGRAMS[program]
    for word in rest.split():
        inner = (
            command.get_command(click.Context(command), word)
            if isinstance(command, click.Group)
            else None
        )
        if inner is None:
            break
        command = inner
    return flags_of(command)
