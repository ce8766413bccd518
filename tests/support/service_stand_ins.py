"""Stand-ins for launchctl, systemctl and the other programs that `fleetctl service` runs, for machines without them.

They keep their state in a folder and run each job as a real child. `launchctl` imitates the race between bootout and
bootstrap, and the exit codes 5, 36, 37, 113 and 125. Only the standard library: each call is a process.
"""

import contextlib
import json
import os
import plistlib
import pwd
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TOOLS = (
    *("launchctl", "systemctl", "pmset", "socketfilterfw", "sysadminctl", "dseditgroup", "dscl", "id"),
    *("networksetup", "ifconfig", "PlistBuddy", "system_profiler"),
    *("sysctl", "useradd", "userdel", "tmutil"),
)  # fmt: skip
POWER = {"sleep": "10", "disksleep": "10", "womp": "0", "powernap": "1", "autorestart": "0", "tcpkeepalive": "1"}  # fmt: skip
# How long a job that has ended is still shown, and how long launchd then refuses to load it again.
_SHOWN_S, _REFUSED_S = 0.3, 0.4
_MARK = "STAND_IN_UNIT"
Tree = dict[str, Any]


def install_tools(
    bin_folder: Path,
    state: Path,
    units: Path,
    *,
    tools: Sequence[str] = TOOLS,
    delays: tuple[float, float] = (_SHOWN_S, _REFUSED_S),
) -> None:
    """Write the stand-ins into a folder for PATH; `units` is where systemctl looks for unit files.

    `delays` are how long launchd shows a job that has ended, and then refuses to load it again.
    """
    bin_folder.mkdir(parents=True)
    (state / "jobs").mkdir(parents=True)
    (state / "loaded").mkdir()
    (state / "units").symlink_to(units)
    machine = {
        "power": POWER,
        "allowed": [],
        "excluded": [],
        "members": [],
        "refused": [],
        "wired": 0,
        "users": {"root": [0, 0]},
        "groups": {},
        "network": {},
    }
    _write(state / "machine.json", machine)
    _write(state / "delays.json", dict(zip(("shown_s", "refused_s"), delays, strict=True)))
    for name in tools:
        path = bin_folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {__file__} {state} {name} "$@"\n')
        path.chmod(0o755)


def machine_of(state: Path) -> Tree:
    """Return the settings of the machine that the stand-ins hold."""
    tree: Tree = json.loads((state / "machine.json").read_text())
    return tree


def change_machine(state: Path, **values: object) -> None:
    """Change settings of the machine that the stand-ins hold, as a person would."""
    _write(state / "machine.json", machine_of(state) | values)


def end_jobs(state: Path) -> None:
    """Kill everything that the stand-ins run."""
    for path in (state / "jobs").glob("*.json"):
        tree = _read(path)
        for pid in (tree.get("keeper"), tree.get("pid")):
            _kill(pid, signal.SIGKILL)


def _kill(pid: int | None, number: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _read(path: Path) -> Tree:
    try:
        tree: Tree = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return tree


def _write(path: Path, tree: Mapping[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(tree))
    draft.replace(path)


class Keeper:
    """The process that runs one job, as launchd or systemd does."""

    def __init__(self, state: Path, name: str) -> None:
        self._path = state / "jobs" / f"{name}.json"
        self._job = _read(state / "jobs" / f"{name}.job")
        self._gone = state / "jobs" / f"{name}.gone"
        self._is_ending = False
        self._tree: Tree = {"keeper": os.getpid(), "pid": None, "runs": 0, "last_exit": None, "state": "running"}  # fmt: skip

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._end)
        while not self._is_ending:
            self._run_once()
            if not self._is_ending:
                time.sleep(0.1)
        self._tree["state"] = "exiting"
        self._save()
        time.sleep(self._job["shown_s"])
        self._gone.touch()
        self._path.unlink()
        time.sleep(self._job["refused_s"])
        self._gone.unlink()

    def _end(self, *_: object) -> None:
        self._is_ending = True
        _kill(self._tree["pid"], signal.SIGTERM)

    def _save(self) -> None:
        _write(self._path, self._tree)

    def _run_once(self) -> None:
        if self._job["interval"]:
            self._save()
            while not self._is_ending:
                time.sleep(0.01)
            return
        user = _user(self._job.get("user", ""))
        try:
            with Path(self._job["log"]).open("ab") as log:
                child = subprocess.Popen(
                    self._job["argv"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    cwd=self._job["cwd"], env=self._job["env"], start_new_session=True,
                    user=user.pw_uid if user else None, group=user.pw_gid if user else None,
                    extra_groups=[] if user else None,
                )  # fmt: skip
        except OSError:
            self._tree |= {"pid": None, "last_exit": 78, "runs": self._tree["runs"] + 1}
            self._save()
            return
        self._tree |= {"pid": child.pid, "runs": self._tree["runs"] + 1}
        self._save()
        if self._is_ending:
            child.terminate()
        code = self._wait(child)
        if self._job["kills_group"]:
            self._kill_rest(child.pid)
        self._tree |= {"pid": None, "last_exit": code}
        self._save()

    def _wait(self, child: "subprocess.Popen[bytes]") -> int:
        waited_s = 0.0
        while child.poll() is None:
            if self._is_ending:
                waited_s += 0.01
                if waited_s > self._job["exit_timeout"]:
                    child.kill()
            time.sleep(0.01)
        return child.returncode

    def _kill_rest(self, group: int) -> None:
        """Kill what else runs in the process group (launchd), or has the unit's mark (systemd's control group)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        mark = f"{_MARK}={self._job['env'].get(_MARK)}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    _kill(int(path.parent.name), signal.SIGKILL)
            except OSError:
                pass


def _user(name: str) -> pwd.struct_passwd | None:
    """Return the user that a program runs as; None for this one: it is not root, or the user is not real."""
    try:
        return pwd.getpwnam(name) if os.getuid() == 0 and name else None
    except KeyError:
        return None


def _start_keeper(state: Path, name: str, job: Mapping[str, Any]) -> None:
    _write(state / "jobs" / f"{name}.job", job)
    subprocess.Popen(
        [sys.executable, "-SE", __file__, str(state), "keeper", name],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    _wait_for(lambda: (state / "jobs" / f"{name}.json").exists())


def _wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)


def _answer(code: int, text: str) -> int:
    print(text, file=sys.stderr)
    return code


def launchctl(state: Path, words: list[str]) -> int:
    """Answer as launchctl(1) does."""
    verb = words[0]
    if verb == "bootstrap":
        return _bootstrap(state, words[1], Path(words[2]))
    target = words[-1]
    path = state / "jobs" / f"{target.rpartition('/')[2]}.json"
    job = _read(path)
    if verb == "enable":
        return 0
    if verb == "print":
        if not job:
            return _answer(113, f'Could not find service "{target}" in domain for system')
        print(_printed(target, job))
        return 0
    if verb == "bootout":
        if not job:
            return _answer(3, "Boot-out failed: 3: No such process")
        _kill(job["keeper"], signal.SIGTERM)
        return _answer(36, "Boot-out failed: 36: Operation now in progress")
    if verb == "kickstart":
        if not job or job["state"] == "exiting":
            return _answer(37, "Kickstart failed: 37: Operation already in progress")
        return 0
    return _answer(64, f"Unrecognized subcommand: {verb}")


def _bootstrap(state: Path, domain: str, path: Path) -> int:
    codes = state / "bootstrap-codes"
    if codes.exists() and (left := codes.read_text().split()):
        codes.write_text(" ".join(left[1:]))
        return _answer(int(left[0]), f"Bootstrap failed: {left[0]}")
    if domain.startswith("gui/"):
        return _answer(125, "Bootstrap failed: 125: Domain does not support specified action")
    tree = plistlib.loads(path.read_bytes())
    label = tree["Label"]
    if (state / "jobs" / f"{label}.json").exists() or (state / "jobs" / f"{label}.gone").exists():
        return _answer(5, "Bootstrap failed: 5: Input/output error")
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", **tree.get("EnvironmentVariables", {})}
    job = {
        "argv": tree["ProgramArguments"],
        "env": environment,
        "cwd": tree.get("WorkingDirectory", "/"),
        "log": tree.get("StandardOutPath", os.devnull),
        "exit_timeout": tree.get("ExitTimeOut", 20),
        "kills_group": not tree.get("AbandonProcessGroup", False),
        "interval": tree.get("StartInterval", 0),
        "allowed": machine_of(state)["allowed"],
        **_read(state / "delays.json"),
    }
    _start_keeper(state, label, job)
    return 0


def _printed(target: str, job: Tree) -> str:
    code = "(never exited)" if job["last_exit"] is None else str(job["last_exit"])
    pid = f"\tpid = {job['pid']}\n" if job["pid"] else ""
    return (
        f"{target} = {{\n\tactive count = 1\n\tstate = running\n\n\targuments = {{\n\t\tpid = 1\n\t}}\n"
        f"\texit timeout = 5\n\truns = {job['runs']}\n{pid}\tlast exit code = {code}\n}}"
    )


def systemctl(state: Path, words: list[str]) -> int:
    """Answer as systemctl(1) does."""
    words = [word for word in words if word != "--user"]
    verb, unit = words[0], words[-1]
    folder, loaded = (state / "units").resolve(), state / "loaded"
    if verb == "daemon-reload":
        for old in loaded.iterdir():
            old.unlink()
        for path in folder.glob("*.service"):
            (loaded / path.name).write_bytes(path.read_bytes())
        return 0
    if verb == "show":
        return _show(state, unit)
    link = folder / "multi-user.target.wants" / unit
    if verb == "enable":
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(folder / unit)
        return 0
    if verb == "disable":
        link.unlink(missing_ok=True)
        if link.parent.exists() and not any(link.parent.iterdir()):
            link.parent.rmdir()
        return 0
    if not (loaded / unit).exists():
        return _answer(5, f"Failed to {verb} {unit}: Unit {unit} not loaded.")
    path = state / "jobs" / f"{unit}.json"
    if verb == "start" and not path.exists():
        _start_keeper(state, unit, _unit_job(unit, (loaded / unit).read_text()))
    if verb == "stop" and path.exists():
        _kill(_read(path).get("keeper"), signal.SIGTERM)
        _wait_for(lambda: not path.exists() and not path.with_suffix(".gone").exists())
    return 0


def _unit_job(unit: str, text: str) -> Tree:
    pairs = [line.partition("=")[::2] for line in text.splitlines() if "=" in line]
    keys = dict(pairs)
    words = [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(keys["ExecStart"])]
    environment = {"PATH": "/usr/bin:/bin", _MARK: unit}
    for key, value in pairs:
        if key == "Environment":
            name, _, text = shlex.split(value)[0].partition("=")
            environment[name] = text.replace("%%", "%")
    return {
        "argv": words,
        "env": environment,
        "user": keys.get("User", ""),
        "cwd": keys["WorkingDirectory"],
        "log": os.devnull,
        "exit_timeout": int(keys["TimeoutStopSec"]),
        "kills_group": keys.get("KillMode", "control-group") != "process",
        "interval": 0,
        "shown_s": 0,
        "refused_s": 0,
    }


def _show(state: Path, unit: str) -> int:
    job = _read(state / "jobs" / f"{unit}.json")
    is_loaded = (state / "loaded" / unit).exists()
    print(f"LoadState={'loaded' if is_loaded else 'not-found'}")
    print(f"ActiveState={'active' if job else 'inactive'}\nNeedDaemonReload=no")
    print(f"MainPID={job.get('pid') or 0}\nNRestarts={max(0, job.get('runs', 1) - 1)}")
    print(f"ExecMainStatus={job.get('last_exit') or 0}")
    return 0


def settings(state: Path, tool: str, words: list[str]) -> int:  # noqa: C901 - one branch for each program
    """Answer as the programs do that read and change settings of the machine."""
    machine = machine_of(state)
    users, groups = machine["users"], machine["groups"]
    own = os.getuid()
    if tool in machine["refused"]:  # as socketfilterfw does on a Mac with a profile of MDM
        return _answer(
            1, "Firewall settings cannot be modified from command line on managed Mac computers."
        )
    if tool == "pmset" and words[:1] == ["-g"]:
        rows = "".join(f" {key:<20} {value}\n" for key, value in machine["power"].items())
        print(f"Battery Power:\n sleep                1\nAC Power:\n{rows}", end="")
        return 0
    if tool == "pmset":
        machine["power"][words[1]] = words[2]
    elif tool == "socketfilterfw" and words == ["--listapps"]:
        for number, path in enumerate(machine["allowed"], 1):
            print(f"{number} : {path} \n             (Allow incoming connections) ")
        return 0
    elif tool == "socketfilterfw":
        allowed = [path for path in machine["allowed"] if path != words[1]]
        machine["allowed"] = allowed + ([words[1]] if words[0] != "--remove" else [])
    elif tool == "tmutil" and words[0] == "isexcluded":
        print(f"[{'Excluded' if words[1] in machine['excluded'] else 'Included'}]    {words[1]}")
        return 0
    elif tool == "tmutil":
        excluded = [path for path in machine["excluded"] if path != words[1]]
        machine["excluded"] = excluded + ([words[1]] if words[0] == "addexclusion" else [])
    elif tool == "sysctl" and words[0] == "-n":
        print(machine["wired"])
        return 0
    elif tool == "sysctl":
        machine["wired"] = int(words[0].partition("=")[2])
    elif tool == "id":
        name = words[0]
        if name not in users:
            return _answer(1, f"id: {name}: no such user")
        uid, gid = users[name]
        print(f"uid={uid}({name}) gid={gid}({name}) groups={gid}({name}),12(everyone)")
        return 0
    elif tool == "dscl":
        print("".join(f"{name}  {ids[0]}\n" for name, ids in users.items()), end="")
        return 0
    elif tool == "dseditgroup":
        name = words[-1]
        if words[1] == "read":
            return 0 if name in groups else 1
        if words[1] == "checkmember":
            is_member = words[3] in machine["members"]
            word, negation = ("yes", "") if is_member else ("no", "NOT ")
            print(f"{word} {words[3]} is {negation}a member of {name}")
            return 0 if is_member else 67
        if words[1] == "edit":
            members = [member for member in machine["members"] if member != words[3]]
            machine["members"] = members + ([words[3]] if words[2] == "-a" else [])
            _write(state / "machine.json", machine)
            return 0
        if words[1] == "create":
            groups[name] = int(words[words.index("-i") + 1])
        else:
            del groups[name]
    elif tool in ("sysadminctl", "useradd"):
        name = words[-1] if tool == "useradd" else words[1]
        if words[0] == "-deleteUser":
            del users[name]
        else:
            number = int(words[words.index("-UID") + 1]) if "-UID" in words else 998
            # Without root, files can be given to nobody else.
            users[name] = [number, number] if own == 0 else [own, os.getgid()]
    elif tool == "userdel":
        del users[words[-1]]
    _write(state / "machine.json", machine)
    return 0


def plug_cables(state: Path, capture: Path) -> None:
    """Let the machine have the Thunderbolt ports of a capture, with the bridge and the services that macOS makes."""
    members = re.findall(r"member: (\S+) ", (capture / "ifconfig.txt").read_text())
    ports = re.findall(
        r"Hardware Port: (.+)\nDevice: (.+)", (capture / "hardware_ports.txt").read_text()
    )
    named = [(port, device) for port, device in ports if not re.match(r"Thunderbolt \d", port)]
    stored = {
        "Interfaces": members,
        "SCNetworkInterfaceType": "Bridge",
        "UserDefinedName": "Thunderbolt Bridge",
    }
    network = {
        "capture": str(capture), "stored": {"bridge0": stored} if members else {},
        "running": {"bridge0": members} if members else {},
        "services": {port: _service(port, device) for port, device in named},
    }  # fmt: skip
    _write(state / "machine.json", {**machine_of(state), "network": network})


def _service(port: str, device: str) -> Tree:
    return {"port": port, "device": device, "on": True, "method": "DHCP", "address": "", "mask": ""}


def networks(state: Path, tool: str, words: list[str]) -> int:
    """Answer as networksetup(8), ifconfig(8), PlistBuddy(8) and system_profiler(8) do, from one state."""
    machine = machine_of(state)
    network = machine["network"]
    capture = Path(network["capture"])
    if tool == "system_profiler":
        print((capture / "thunderbolt.json").read_text())
        return 0
    if words == ["-listallhardwareports"]:
        print((capture / "hardware_ports.txt").read_text())
        return 0
    code = {"networksetup": _networksetup, "ifconfig": _ifconfig, "PlistBuddy": _plist_buddy}[tool](network, words)  # fmt: skip
    _write(state / "machine.json", machine)
    return code


def _networksetup(network: Tree, words: list[str]) -> int:
    verb, services = words[0], network["services"]
    if verb == "-listnetworkserviceorder":
        print("An asterisk (*) denotes that a network service is disabled.")
        for number, (name, service) in enumerate(services.items(), 1):
            print(f"({number if service['on'] else '*'}) {name}")
            print(f"(Hardware Port: {service['port']}, Device: {service['device']})\n")
        return 0
    name = words[1]
    if verb == "-createnetworkservice":
        text = (Path(network["capture"]) / "hardware_ports.txt").read_text()
        device = re.search(rf"Hardware Port: {words[2]}\nDevice: (.+)", text)
        if device is None or name in services:
            return _answer(4, "** Error: The parameters were not valid.")
        services[name] = _service(words[2], device[1])
        return 0
    if name not in services:
        print(
            f"{name} is not a recognized network service.\n** Error: The parameters were not valid."
        )
        return 4
    service = services[name]
    if verb == "-getinfo":
        print(
            f"{service['method']} Configuration\nIP address: {service['address']}\nSubnet mask: {service['mask']}"
        )
        print("Router: (null)\nIPv6: Automatic\nIPv6 IP address: none")
    elif verb == "-setmanual" and network.get("is_managed"):
        print("** Error: a profile forbids it.")  # some refusals end with 0
    elif verb == "-setmanual":
        service |= {"method": "Manual", "address": words[2], "mask": words[3]}
    elif verb == "-setdhcp":
        service |= {"method": "DHCP", "address": "", "mask": ""}
    elif verb == "-setnetworkserviceenabled":
        service["on"] = words[2] == "on"
    elif verb == "-removenetworkservice":
        del services[name]
    return 0


def _ifconfig(network: Tree, words: list[str]) -> int:
    running = network["running"]
    if not words:
        text = (Path(network["capture"]) / "ifconfig.txt").read_text()
        print(re.sub(r"^bridge\d+: .*\n(?:\s.*\n)*", "", text, flags=re.MULTILINE), end="")
        for name, members in running.items():
            print(f"{name}: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500")
            for number, member in enumerate(members, 8):
                print(
                    f"\tmember: {member} flags=3<LEARNING,DISCOVER>\n\t        ifmaxaddr 0 port {number} priority 0 path cost 0"
                )
        return 0
    name, verb = words[:2]
    if verb == "create":
        running[name] = []
    elif name not in running:
        return _answer(1, f"ifconfig: interface {name} does not exist")
    elif verb == "addm":
        running[name].append(words[2])
    elif verb == "deletem":
        running[name].remove(words[2])
    elif verb == "destroy":
        del running[name]
    return 0


def _plist_buddy(network: Tree, words: list[str]) -> int:
    verb, *rest = words[words.index("-c") + 1].split(" ")
    stored = network["stored"]
    if verb == "Print":
        print(plistlib.dumps(stored).decode(), end="")
    elif verb == "Add":
        return _answer(1, 'Add: ":VirtualNetworkInterfaces:Bridge" Entry Already Exists')
    elif verb == "Merge":
        stored |= plistlib.loads(Path(rest[0]).read_bytes())
    elif (name := rest[0].rpartition(":")[2]) in stored:
        del stored[name]
    else:
        return _answer(1, f'Delete: Entry, "{rest[0]}", Does Not Exist')
    return 0


def main() -> int:
    """Run `service_stand_ins.py STATE TOOL WORD...`; return the exit code."""
    state, tool, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with (state / "calls").open("a") as calls:
        calls.write(" ".join((tool, *words)) + "\n")
    if tool == "keeper":
        Keeper(state, words[0]).run()
        return 0
    if tool == "launchctl":
        return launchctl(state, words)
    if tool in ("networksetup", "ifconfig", "PlistBuddy", "system_profiler"):
        return networks(state, tool, words)
    return systemctl(state, words) if tool == "systemctl" else settings(state, tool, words)


if __name__ == "__main__":
    sys.exit(main())
