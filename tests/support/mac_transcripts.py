"""Programs at the place of macOS's, which replay transcripts: the same arguments, or exit code 64."""

import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from machinery import macos_commands as mac
from machinery.macos_commands import COMMANDS, MacCommand
from tests.support import service_stand_ins

CAPTURES = Path(__file__).parents[1] / "nodeagent" / "hardware" / "captures"
# Programs that every system has, which root runs.
_TOOLS = ("mktemp", "tee", "chmod", "chown", "rm", "kill", "ps")


def transcripts() -> dict[MacCommand, str]:
    """Return the outputs of a Mac mini with an M4 Pro whose sources agree with each other."""

    def text(*parts: str) -> str:
        return CAPTURES.joinpath(*parts).read_text()

    facts, ioreg = text("m4_pro", "sysctl.txt"), text("m4_pro", "ioreg.txt")
    return {
        mac.FACTS_SYSCTL: facts,
        mac.CHIP_SYSCTL: facts.splitlines(keepends=True)[0],
        mac.MODEL_SYSCTL: "hw.memsize: 68719476736\nhw.model: Mac16,11\n",
        mac.MEMORY_SYSCTL: "kern.memorystatus_vm_pressure_level: 1\nhw.memsize: 68719476736\niogpu.wired_limit_mb: 0\n",
        mac.WIRED_LIMIT: "0\n",
        mac.HARDWARE: text("m4_pro", "profiler.json"),
        mac.VERSION: text("m4_pro", "sw_vers.txt"),
        mac.BUILD: "25C56\n",
        mac.GPU_REGISTRY: ioreg.partition("\n\n")[0],
        mac.BOARD_REGISTRY: ioreg.partition("\n\n")[2],
        mac.LOCAL_NAME: "annas-mini\n",
        mac.HOST_NAME: "annas-mini.local\n",
        mac.TRANSLATED: "sysctl.proc_translated: 0\n",
        mac.IS_TRANSLATED: "0\n",
        mac.VM_STAT: text("vm_stat.txt"),
        mac.THUNDERBOLT: text("fabric", "studio", "thunderbolt.json"),
        mac.HARDWARE_PORTS: text("fabric", "studio", "hardware_ports.txt"),
        mac.INTERFACES: text("fabric", "studio", "ifconfig.txt"),
        mac.RDMA_STATUS: "enabled\n",
        mac.RDMA_DEVICES: text("fabric", "studio", "ibv_devinfo.txt"),
        mac.NEIGHBOURS: "? (192.168.1.77) at 2:0:0:0:0:7 on en0 ifscope [ethernet]\n",
        mac.PROGRAMS: "/Users/anna/bin/tool\n/usr/sbin/cfprefsd\n",
        mac.POWER_SETTINGS: text("settings", "well", "pmset_custom.txt"),
        mac.THERMAL_LEVEL: f"{mac.THERMAL_LEVEL.arguments[1]} 0\n",
        mac.KERNEL: "Darwin arm64\n",
        mac.JOB: text("settings", "ill", "launchctl_print.txt"),
    }


def install(folder: Path, outputs: Mapping[MacCommand, str], *, state: Path | None = None) -> None:
    """Write the programs into a folder; with `state` also sudo and a launchctl that runs jobs."""
    folder.mkdir()
    by_program: dict[str, list[str]] = {}
    for number, command in enumerate(COMMANDS.values()):
        if command.is_change:
            continue
        name = Path(command.program).name
        words = " ".join(command.words(**command.examples)[1:])
        text = folder / f"{number}.out"
        text.write_text(outputs.get(command, ""))
        end = f"cat {text}" if command in outputs else "exit 1"
        by_program.setdefault(name, []).append(f"  {shlex.quote(words)}) {end};;")
    for name, cases in by_program.items():
        _write(folder / name, ['case "$*" in', *cases, '  *) echo "unexpected: $*" >&2; exit 64;;', "esac"])  # fmt: skip
    if state is None:
        return
    tools = folder / "services"
    service_stand_ins.install_tools(tools, state, folder, tools=("launchctl",), delays=(0.05, 0.05))
    print_known = " ".join(mac.JOB.words(**mac.JOB.examples)[1:])
    known = (folder / "launchctl").read_text().splitlines()
    line = next(line for line in known if print_known in line)
    _write(folder / "launchctl", ['case "$*" in', line, f'  *) exec {tools / "launchctl"} "$@";;', "esac"])  # fmt: skip
    # Without its flags, for root and for the role account alike.
    _write(folder / "sudo", ['case "$1" in -v) exit 0;; esac', "shift", 'case "$1" in -u) shift 2;; esac', "shift", 'exec "$@"'])  # fmt: skip
    for name in _TOOLS:
        real = shutil.which(name)
        assert real is not None
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(real)


def device_check(folder: Path, result: str) -> tuple[str, ...]:
    """Return the arguments of a program that prints the result of a device check."""
    return (sys.executable, "-SEc", f"print({result!r})")


def _write(path: Path, lines: list[str]) -> None:
    path.unlink(missing_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
