"""The smoke test of the benches knows all of them, and tells a bench that works from one that does not."""

import pytest

from bench import smoke


def test_the_benches_are_those_of_the_makefile() -> None:
    assert {"engine", "gateway-faults", "walks"} < smoke.BENCHES.keys()
    assert smoke.BENCHES["engine"] == "bench.engine"
    assert "smoke" not in smoke.BENCHES


@pytest.mark.parametrize(
    ("code", "output", "fault"),
    [
        pytest.param(0, 'a table\n{"bench": "x", "r": 1, "failed": {}}\n', "", id="works"),
        pytest.param(0, '{"bench": "x", "r": 1, "failed": {"p": "no"}}', "", id="without-a-peer"),
        pytest.param(1, "a\nb\nc\nValueError: d", "exit code 1: b | c | ValueError: d", id="fails"),
        pytest.param(0, "a table", "its last line is not JSON", id="no-json"),
        pytest.param(0, "", "its last line is not JSON", id="silent"),
        pytest.param(0, '{"r": 1}', "its last line does not say", id="not-by-the-helper"),
    ],
)
def test_a_bench_is_judged_by_its_exit_code_and_last_line(
    code: int, output: str, fault: str
) -> None:
    assert smoke.fault(code, output).startswith(fault)
    assert bool(smoke.fault(code, output)) is bool(fault)
