"""Unix sockets: private folders, stale files, and never two listeners at one path."""

import errno
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from machinery import unix_sockets
from machinery.unix_sockets import SocketFolderError

_RACER = """
import sys
from pathlib import Path
from machinery import unix_sockets
sys.stdin.readline()
try:
    listener, _ = unix_sockets.listen(Path(sys.argv[1]))
except OSError:
    print("lost", flush=True)
else:
    print("won", flush=True)
sys.stdin.readline()
"""


def accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def test_a_socket_is_accessible_by_its_owner_only(short_folder: Path) -> None:
    path = short_folder / "s"
    before = os.umask(0)
    try:
        listener, file = unix_sockets.listen(path)
    finally:
        os.umask(before)
    with listener:
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert accepts(path)
        file.remove()
    assert not path.exists()


def test_the_file_of_a_killed_process_is_replaced(short_folder: Path) -> None:
    path = short_folder / "s"
    unix_sockets.listen(path)[0].close()
    assert path.exists()
    assert not unix_sockets.is_in_use(path)
    listener, _ = unix_sockets.listen(path)
    with listener:
        assert accepts(path)


def test_a_socket_in_use_is_left_alone(short_folder: Path) -> None:
    path = short_folder / "s"
    listener, _ = unix_sockets.listen(path)
    with listener:
        with pytest.raises(OSError, match="in use") as caught:
            unix_sockets.listen(path)
        assert caught.value.errno == errno.EADDRINUSE
        assert accepts(path)


def test_a_file_that_is_no_socket_is_left_alone(short_folder: Path) -> None:
    path = short_folder / "s"
    path.write_text("mine")
    with pytest.raises(OSError, match="in use"):
        unix_sockets.listen(path)
    assert path.read_text() == "mine"


def test_a_process_removes_its_own_file_only(short_folder: Path) -> None:
    path = short_folder / "s"
    first, file = unix_sockets.listen(path)
    path.rename(short_folder / "kept")  # or the number of the file would be given out again
    second, _ = unix_sockets.listen(path)
    with first, second:
        file.remove()
        assert accepts(path)


def test_one_of_many_processes_gets_a_stale_path(short_folder: Path) -> None:
    path = short_folder / "s"
    unix_sockets.listen(path)[0].close()
    command = [sys.executable, "-c", _RACER, str(path)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    try:
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        results = [racer.stdout.readline().strip() for racer in racers if racer.stdout is not None]
    finally:
        for racer in racers:
            racer.communicate("\n", timeout=30)
    assert sorted(results) == [*(["lost"] * 5), "won"]


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o777])
def test_a_folder_that_others_may_enter_is_refused(short_folder: Path, mode: int) -> None:
    short_folder.chmod(mode)
    with pytest.raises(SocketFolderError, match="is open to other users"):
        unix_sockets.listen(short_folder / "s")


def test_a_link_to_a_folder_is_refused(short_folder: Path) -> None:
    (short_folder / "real").mkdir(mode=0o700)
    (short_folder / "link").symlink_to(short_folder / "real")
    with pytest.raises(SocketFolderError, match="belongs to another user"):
        unix_sockets.listen(short_folder / "link" / "s")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(short_folder: Path) -> None:
    (short_folder / "theirs").mkdir(mode=0o700)
    os.chown(short_folder / "theirs", 12345, -1)
    with pytest.raises(SocketFolderError, match="belongs to another user"):
        unix_sockets.check_private(short_folder / "theirs")


_STRANGER = """
import os, socket, sys
os.setgid(12345), os.setuid(12345)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    print("no permission")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect(short_folder: Path) -> None:
    listener, _ = unix_sockets.listen(short_folder / "s")
    with listener:
        command = [sys.executable, "-c", _STRANGER, str(short_folder / "s")]
        assert subprocess.check_output(command, text=True) == "no permission\n"
