"""The last line of a bench names peers that failed, and a bench that compared nothing fails."""

import json
import os
import signal
import subprocess
import sys

import pytest

from bench.harness import PeerError, cpu_s, finish, of_peer, recorded


def fail(error: Exception) -> None:
    raise error


def last(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_what_was_compared_comes_first_and_failed_peers_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed: dict[str, str] = {}
    with recorded(failed, "slow"), of_peer():
        fail(TimeoutError("it did not serve within 5 s"))
    with recorded(failed, "missing"):
        fail(PeerError("not installed"))
    finish("demo", {"ratio": 0.9}, {"rounds": 3}, failed=failed)
    line = last(capsys)
    assert list(line)[:4] == ["bench", "ratio", "failed", "rounds"]
    assert line["failed"] == {
        "slow": "TimeoutError: it did not serve within 5 s",
        "missing": "not installed",
    }


@pytest.mark.parametrize("compared", [{}, {"ratio": None}])
def test_a_bench_that_compared_nothing_fails(
    compared: dict[str, float | None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"nothing was compared \(etcd3gw: no module\)"):
        finish("demo", compared, {}, failed={"etcd3gw": "no module"})
    assert last(capsys)["failed"] == {"etcd3gw": "no module"}


def test_a_failure_of_ours_is_no_peers() -> None:
    failed: dict[str, str] = {}
    with pytest.raises(ZeroDivisionError), recorded(failed, "peer"):
        raise ZeroDivisionError
    assert failed == {}


_CHILD = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); time.sleep(60)"
_PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_CHILD!r}])"


def test_the_processor_time_of_a_process_tree_has_its_children() -> None:
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            assert parent.stdout is not None
            parent.stdout.readline()
            assert cpu_s(parent.pid) >= 0.5
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
