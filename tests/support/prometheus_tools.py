"""Prometheus' own checker of the text format (Debian's package `prometheus`), where it is installed."""

import shutil
import subprocess

# Complaints about names that are not ours: vLLM has colons in its names, and a type `counter` only for some.
_ACCEPTED = ("metric names should not contain ':'",)


def check_metrics(text: bytes) -> None:
    """Fail if `promtool` cannot parse the metrics, or if it finds fault with anything but vLLM's names."""
    program = shutil.which("promtool")
    if program is None:
        return
    done = subprocess.run(
        [program, "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert not done.stdout, done.stdout
    complaints = [
        line
        for line in done.stderr.decode().splitlines()
        if not any(accepted in line for accepted in _ACCEPTED)
    ]
    # 3: it parses, and a name does not follow the conventions.
    assert done.returncode in (0, 3), done.stderr
    assert complaints == []
