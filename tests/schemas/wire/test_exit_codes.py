"""Exit codes, which agents of other versions read too."""

from schemas.wire.exit_codes import ExitCode


def test_the_codes_never_change() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "CRASHED": 1,
        "UNUSABLE": 2,
        "ADDRESS_IN_USE": 3,
        "GROUP_LOST": 4,
    }
    assert f"it ended with {ExitCode.GROUP_LOST}" == "it ended with 4"
