"""machinery/macos_commands.py is the only file that names a program of macOS to start."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetctl.mac_report.parsers import PARSERS
from machinery import macos_commands
from machinery.macos_commands import COMMANDS, MacCommand
from schemas.wire import wired_limit
from tests.support.syntax import PRODUCTION, tree

ROOT = Path(__file__).parents[2]
# Programs that only macOS has: a first word of an argument list cannot be anything else.
NAMES = frozenset((
    "sysctl", "system_profiler", "ioreg", "pmset", "socketfilterfw", "launchctl", "networksetup",
    "ifconfig", "dseditgroup", "sysadminctl", "fdesetup", "defaults", "netstat", "sw_vers",
    "scutil", "vm_stat", "notifyutil", "macmon", "rdma_ctl", "ibv_devinfo", "ibv_devices", "sntp",
    "arp", "nc", "plutil", "dscl", "diskutil", "tmutil", "mdutil", "sfltool", "caffeinate", "xattr",
    "powermetrics", "memory_pressure", "spctl", "codesign", "csrutil", "softwareupdate",
    "systemsetup", "osascript", "mdfind", "dns-sd",
))  # fmt: skip
# Paths below these folders are programs; so is each path of the registry.
FOLDERS = ("/usr/sbin/", "/usr/libexec/", "/System/")
STARTERS = frozenset(("run", "must_run", "_run", "command_output", "create_subprocess_exec", "Popen", "which"))  # fmt: skip
# Programs that run on the Macs of an operator and on Linux alike.
POSIX = frozenset(("rm", "tee", "chmod", "chown", "mktemp", "kill", "sudo"))
# Programs of systems other than macOS, and shells, which each system has.
OTHERS = frozenset(("/usr/sbin/nologin",))


def started(module: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, word) of words that start a program of macOS."""
    programs = {command.program for command in COMMANDS.values() if "/" in command.program}
    names = NAMES | {command.words(**_any(command))[0] for command in COMMANDS.values()} - POSIX
    for node in ast.walk(module):
        first: ast.expr | None = None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            is_path = text.startswith(FOLDERS) and " " not in text and not text.endswith("/")
            if text not in OTHERS and (text in programs or is_path):
                yield node.lineno, text
            continue
        allowed = NAMES
        if isinstance(node, ast.Tuple | ast.List) and len(node.elts) > 1:
            first = node.elts[0]
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")  # fmt: skip
            if called in STARTERS:
                first, allowed = node.args[0], names
                if isinstance(first, ast.Tuple | ast.List) and first.elts:
                    first = first.elts[0]
        if isinstance(first, ast.Constant) and first.value in allowed:
            yield first.lineno, str(first.value)


def _any(command: MacCommand) -> dict[str, str]:
    return dict.fromkeys(command.parameters, "1")


def test_no_other_file_starts_a_program_of_macos() -> None:
    registry = Path(str(macos_commands.__file__))
    programs = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for package in PRODUCTION
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != registry
        for line, word in started(tree(path))
    ]
    assert not programs, "register these in machinery/macos_commands.py:\n" + "\n".join(programs)


@pytest.mark.parametrize(
    "source",
    [
        'run(("/usr/bin/vm_stat",))',
        'argv = ("sysctl", "-n", "hw.memsize")',
        'await commands.must_run("pmset", "-c", "sleep", "0")',
        '_TOOL = "/usr/libexec/ApplicationFirewall/socketfilterfw"',
        'subprocess.run(["tmutil", "addexclusion", path])',
    ],
)
def test_a_program_that_is_started_elsewhere_is_noticed(source: str) -> None:
    assert list(started(ast.parse(source)))


def test_words_of_other_meaning_are_no_programs() -> None:
    source = 'NAMES = ("hostname", "model")\nHELP = "run `/usr/bin/vm_stat`"\nlog.info("route")'
    assert not list(started(ast.parse(source)))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_a_command_is_complete(command: MacCommand) -> None:
    assert command.timeout_s > 0
    if not command.is_change:
        assert command.parameters == set(command.examples)
        assert command in PARSERS, "add its parser to fleetctl/mac_report/parsers.py"
    assert command.argv(**_any(command))[1:] == command.words(**_any(command))[1:]
    assert command.program.startswith("/") or command.program in ("macmon", "rdma_ctl", "ibv_devinfo")  # fmt: skip


def test_names_are_unique_and_the_sysctl_is_that_of_the_schema() -> None:
    constants = [v for v in vars(macos_commands).values() if isinstance(v, MacCommand)]
    assert len(constants) == len(COMMANDS)
    assert wired_limit.SYSCTL in macos_commands.WIRED_LIMIT.arguments
