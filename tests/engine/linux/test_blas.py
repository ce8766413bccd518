"""The fast BLAS: correct products, several compilers at once, and no code from a folder that others can write."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.linux import blas

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(sys.platform != "linux", reason="only MLX's CPU build needs it"),
]

PRODUCTS = """
import sys
from pathlib import Path
from engine.linux import blas
assert blas.install(Path(sys.argv[1]))
import mlx.core as mx, numpy as np
random = np.random.default_rng(0)
for rows in (1, 5):
    for flip_a in (False, True):
        for flip_b in (False, True):
            a = random.standard_normal((7, rows) if flip_a else (rows, 7)).astype(np.float32)
            b = random.standard_normal((9, 7) if flip_b else (7, 9)).astype(np.float32)
            x, y = mx.array(a), mx.array(b)
            got = np.array((x.T if flip_a else x) @ (y.T if flip_b else y))
            want = (a.T if flip_a else a) @ (b.T if flip_b else b)
            assert np.allclose(got, want, atol=1e-5), (rows, flip_a, flip_b)
"""


@pytest.mark.timeout(120)
def test_processes_compile_it_at_once_and_multiply_correctly(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "blas"
    command = [sys.executable, "-c", PRODUCTS, str(cache)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    for process in running:
        _, stderr = process.communicate(timeout=100)
        assert process.returncode == 0, stderr.decode()
    assert cache.stat().st_mode & 0o777 == 0o700
    assert len(list(cache.iterdir())) == 1


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert blas._shim(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
