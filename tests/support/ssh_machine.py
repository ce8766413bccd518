"""A machine of its own for ssh: a network namespace with sshd, its processes, and a root folder over this machine's.

What it writes goes to a tmpfs (`upper`), so that the tree of files can be compared, and the disk can be full. It has a user
`admin` with a key, sudo, and a stand-in for systemd. Needs root on Linux.
"""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from machinery.clock import SystemClock
from tests.support import netns, service_stand_ins

_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START = """#!/bin/sh
set -e
base=$1 host=$2
root=$base/root
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mkdir -p "$root/run/sshd" "$root/run/systemd/system" "$root/run/units/jobs" "$root/run/units/loaded"
ln -s /etc/systemd/system "$root/run/units/units"
hostname mac-2
chmod 755 "$root/root"
exec chroot "$root" /bin/sh /etc/machine-init
"""
_INIT = """#!/bin/sh
set -e
id admin >/dev/null 2>&1 || useradd --create-home --shell /bin/sh admin
usermod -p '*' admin
mkdir -p /home/admin/.ssh /etc/systemd/system
cp /etc/machine-keys /home/admin/.ssh/authorized_keys
chown -R admin:admin /home/admin
chmod 700 /home/admin/.ssh
touch /run/ready
exec /usr/sbin/sshd -D -f /etc/machine-sshd -E /run/sshd.log
"""
_SSHD = """Port 22
ListenAddress {host}
HostKey /etc/machine-host-key
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
AuthorizedKeysFile .ssh/authorized_keys
Subsystem sftp internal-sftp
LogLevel VERBOSE
"""


def available() -> bool:
    """Return whether such machines can be made here."""
    tools = ("unshare", "mount", "chroot", "useradd", "sudo", "sshd")
    path = f"{os.environ.get('PATH', '')}:{_SYSTEM}"
    return all(shutil.which(tool, path=path) for tool in tools) and netns.available()


@dataclass(slots=True)
class SshMachine:
    """The machine, while it runs."""

    base: Path
    address: str
    prefix: Sequence[str]
    key_file: Path
    host_key: asyncssh.SSHKey
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def target(self) -> str:
        return f"admin@{self.address}"

    @property
    def upper(self) -> Path:
        """Everything that the machine has written."""
        return self.base / "upper"

    @property
    def log(self) -> str:
        return self.inside("cat", "/run/sshd.log")

    def write(self, path: str, text: str, *, mode: int = 0o644) -> None:
        """Write a file of the machine before it starts."""
        file = self.upper / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def new_host_key(self) -> None:
        """Give the machine another host key; sshd takes it with its next start."""
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.write("/etc/machine-host-key", self.host_key.export_private_key().decode(), mode=0o600)

    def start(self) -> None:
        command = (
            *(*self.prefix, "unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child"),
            *("/bin/sh", str(self.base / "start"), str(self.base), self.address),
        )
        with (self.base / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)  # fmt: skip
        clock = SystemClock()
        deadline = clock.monotonic() + 30
        while True:
            with suppress(OSError), socket.create_connection((self.address, 22), timeout=1):
                return
            assert self.process.poll() is None, (self.base / "log").read_text()
            assert clock.monotonic() < deadline, (self.base / "log").read_text()
            time.sleep(0.05)

    def resize_disk(self, size: str) -> None:
        subprocess.run(("mount", "-o", f"remount,size={size}", str(self.base)), check=True)

    def stop(self) -> None:
        """End all of its processes."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def init(self) -> int:
        """Return the process that all others of the machine descend from."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def inside(self, *command: str) -> str:
        """Run a command on the machine as root."""
        entered = ("nsenter", "--target", str(self.init()), "--all", "--root", "--wd=/")
        done = subprocess.run((*entered, *command), capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
        return done.stdout + done.stderr

    def tree(self, *ignored: str) -> dict[str, str]:
        """Return the files that the machine has written, with their modes and contents; not those below `ignored`."""
        found = {}
        for path in sorted(self.upper.rglob("*")):
            name = "/" + path.relative_to(self.upper).as_posix()
            if any(name == one or name.startswith(f"{one}/") for one in ignored):
                continue
            status = path.lstat()
            if path.is_dir() and _is_same_folder(status, Path(name)):
                continue  # of the system: the overlay has copied it for a file in it
            content = ""
            if path.is_symlink():
                content = str(path.readlink())
            elif path.is_file():
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = f"{status.st_mode:o} {status.st_uid}:{status.st_gid} {content}"
        return found


def _is_same_folder(one: os.stat_result, below: Path) -> bool:
    try:
        other = below.lstat()
    except FileNotFoundError:
        return False
    return (one.st_mode, one.st_uid, one.st_gid) == (other.st_mode, other.st_uid, other.st_gid)


@contextmanager
def ssh_machine(base: Path, address: str, prefix: Sequence[str]) -> Iterator[SshMachine]:
    """Run a machine at an address of a namespace, which `prefix` enters."""
    base.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=40g", "tmpfs", str(base)), check=True)
    key = asyncssh.generate_private_key("ssh-ed25519")
    machine = SshMachine(base, address, prefix, base / "id_admin", asyncssh.generate_private_key("ssh-ed25519"))  # fmt: skip
    try:
        for name in ("upper", "work", "root"):
            (base / name).mkdir()
        (base / "start").write_text(_START)
        machine.key_file.write_bytes(key.export_private_key())
        machine.key_file.chmod(0o600)
        stand_in = f"{sys.executable} -SE {service_stand_ins.__file__} /run/units systemctl"
        machine.write("/etc/machine-init", _INIT)
        machine.write("/etc/machine-sshd", _SSHD.format(host=address))
        machine.write("/etc/machine-keys", key.export_public_key().decode(), mode=0o644)
        machine.write("/etc/machine-id", f"{hashlib.sha256(address.encode()).hexdigest()[:32]}\n")
        machine.write("/etc/sudoers.d/admin", "admin ALL=(ALL) NOPASSWD: ALL\n", mode=0o440)
        machine.write("/usr/local/bin/systemctl", f'#!/bin/sh\nexec {stand_in} "$@"\n', mode=0o755)
        machine.new_host_key()
        machine.start()
        yield machine
    finally:
        machine.stop()
        subprocess.run(("umount", "--lazy", str(base)), check=False)
