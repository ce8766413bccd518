"""Puts a fast BLAS in front of the slow one that MLX's CPU wheel bundles, on Linux only.

The wheel bundles the reference BLAS (1.5 GFLOP/s). libmlx takes `cblas_sgemm` from the process's global symbols, so a
library that is loaded globally before the first `import mlx.core` replaces it. This module must not import mlx, and it
never fails: an engine without a fast BLAS is slow, but not wrong. macOS does not need it.
"""

import ctypes
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from machinery import files

# NumPy's wheel contains OpenBLAS under other names, so nothing needs to be installed. One-row products
# go to sgemv, which makes decoding a third faster than with plain OpenBLAS.
_SHIM = r"""
#include <stdint.h>
typedef int64_t I;
typedef const float* V;
void scipy_cblas_sgemm64_(int, int, int, I, I, I, float, V, I, V, I, float, float*, I);
void scipy_cblas_sgemv64_(int, int, I, I, float, V, I, V, I, float, float*, I);
enum { ROW = 101, NO = 111, YES = 112 };
void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, V a, int lda,
                 V b, int ldb, float beta, float* c, int ldc) {
  if (order == ROW && m == 1) { /* c = a * op(b), one row: a matrix-vector product */
    int step = ta == NO ? 1 : lda;
    if (tb == YES) scipy_cblas_sgemv64_(ROW, NO, n, k, alpha, b, ldb, a, step, beta, c, 1);
    else scipy_cblas_sgemv64_(ROW, YES, k, n, alpha, b, ldb, a, step, beta, c, 1);
  } else
    scipy_cblas_sgemm64_(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
"""
# The paths of libopenblas0-pthread on Debian and Ubuntu.
_SYSTEM_LIBRARIES = ("openblas-pthread/libopenblas.so.0", "libopenblas.so.0")
_COMPILE_TIMEOUT_S = 60

log = logging.getLogger(__name__)


def install(cache: Path, *, platform: str = sys.platform) -> bool:
    """Load a fast BLAS into this process; return whether one is in place.

    `cache` is the folder of the compiled shim. Only this user may write to it, because its content is executed.
    """
    if platform != "linux":
        return False
    for candidate in _candidates(cache):
        if _load(candidate):
            log.info("fast BLAS in place", extra={"library": str(candidate)})
            return True
    log.warning("no fast BLAS found; MLX will be some 30 times slower on this CPU")
    return False


def locate(cache: Path) -> Path | None:
    """Return the library that `install` would try first, for processes that load it by LD_PRELOAD."""
    return next(_candidates(cache), None)


def _candidates(cache: Path) -> Iterator[Path]:
    """Yield the libraries to try, fastest first."""
    for path in (_shim(cache), _system_library()):
        if path is not None:
            yield path


def _load(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        log.warning("cannot load a BLAS library", extra={"why": str(error)})
        return False
    return True


def _system_library() -> Path | None:
    folders = [Path("/usr/lib") / f"{os.uname().machine}-linux-gnu", Path("/usr/lib64")]
    candidates = [folder / name for folder in folders for name in _SYSTEM_LIBRARIES]
    return next((path for path in candidates if path.exists()), None)


def _shim(cache: Path) -> Path | None:
    numpy = find_spec("numpy")
    if numpy is None or numpy.origin is None:
        return None
    libraries = Path(numpy.origin).parent.parent / "numpy.libs"
    openblas = next(iter(sorted(libraries.glob("libscipy_openblas64_*.so"))), None)
    if openblas is None:
        return None
    key = hashlib.sha256(f"{_SHIM}{openblas}".encode()).hexdigest()[:16]
    built = cache / f"shim-{key}.so"
    try:
        files.make_private_folder(cache)
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
                source, output = Path(scratch, "shim.c"), Path(scratch, "shim.so")
                source.write_text(_SHIM, encoding="utf-8")
                command = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(output), str(source)]
                command += [str(openblas), f"-Wl,-rpath,{openblas.parent}"]
                # Every word of the command is a constant or NumPy's own path.
                subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
                output.replace(built)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("cannot build the BLAS shim", extra={"why": str(error)})
        return None
    return built
