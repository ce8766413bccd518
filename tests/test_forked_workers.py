"""Forked workers report what happens in them: results, deaths, and errors at the end of a session."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

_CONFTEST = """
import pytest
from tests.support.forked_workers import ForkedWorkers
def pytest_configure(config):
    config.pluginmanager.register(ForkedWorkers(2))
@pytest.fixture(scope="session")
def breaks_at_the_end():
    yield
    assert False, "broken at the end"
"""
_FILES = {
    "conftest.py": _CONFTEST,
    "test_results.py": """
import os
import pytest
def test_passes(tmp_path, capsys):
    print("worker", os.environ["PYTEST_XDIST_WORKER"])
    assert "gw" in capsys.readouterr().out
def test_fails():
    print("printed before")
    assert 1 == 2
def test_skips():
    pytest.skip("no reason")
""",
    "test_death.py": """
import os
def test_dies():
    os._exit(7)
def test_after_it():
    pass
""",
    "test_session.py": "def test_uses(breaks_at_the_end): pass\n",
}


def run(folder: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "--junitxml=junit.xml"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environ.pop("PYTEST_XDIST_WORKER", None)
    environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def write(folder: Path, *names: str) -> None:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name in ("conftest.py", *names):
        (folder / name).write_text(_FILES[name])


def test_results_and_a_broken_end_are_reported(tmp_path: Path) -> None:
    write(tmp_path, "test_results.py", "test_session.py")
    code, output = run(tmp_path)
    assert code == 1, output
    assert "1 failed, 2 passed, 1 skipped, 1 error" in output
    assert "printed before" in output
    assert "broken at the end" in output
    [temporary] = tmp_path.glob("pytest-of-*/pytest-[0-9]*")
    assert not (temporary / ".lock").exists()  # else pytest keeps the folder for three days
    cases = ET.parse(tmp_path / "junit.xml").getroot().iter("testcase")
    outcomes = {(case.get("name"), child.tag) for case in cases for child in case}
    assert outcomes >= {("test_fails", "failure"), ("test_skips", "skipped")}


def test_a_death_fails_one_test(tmp_path: Path) -> None:
    write(tmp_path, "test_results.py", "test_death.py")
    code, output = run(tmp_path)
    assert code == 1, output
    assert "ended with exit code 7 in this test" in output
    assert "2 failed, 2 passed, 1 skipped" in output


def test_exitfirst_ends_the_run(tmp_path: Path) -> None:
    write(tmp_path, "test_results.py", "test_death.py")
    code, output = run(tmp_path, "--exitfirst")
    assert code == 1, output
    assert "stopping after 1 failures" in output


def test_a_module_that_starts_threads_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "test_results.py")
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "test_thread.py").write_text(thread + "def test_it(): pass\n")
    code, output = run(tmp_path)
    assert code == 4, output
    assert "1 threads run after collection" in output
