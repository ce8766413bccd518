"""The golden question: one process answers it alone as an engine does, and what is no answer is none."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models import golden_question
from schemas.formation import GoldenAnswer
from tests.engine.conftest import Engine

pytestmark = pytest.mark.timeout(120)


def ask(model: Path, *flags: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "engine.golden", "--model-dir", str(model), *flags]
    return subprocess.run(command, capture_output=True, check=False, timeout=100)


@pytest.mark.mlx
def test_one_process_answers_as_an_engine_does(
    tiny: Path, engine: Engine, blas_cache: Path
) -> None:
    done = ask(tiny, "--blas-cache", str(blas_cache))
    assert done.returncode == 0, done.stderr
    answer = GoldenAnswer.model_validate_json(done.stdout)
    assert answer.is_reference
    assert len(answer.pieces) == golden_question.MAX_TOKENS
    response = engine.post(golden_question.PATH, **golden_question.request_body("tiny")).json
    other = golden_question.read_answer(response, is_reference=False)
    assert other.pieces == answer.pieces
    assert other.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    assert golden_question.sanity_error(other) == ""


@pytest.mark.mlx
def test_a_broken_model_has_no_answer(tmp_path: Path) -> None:
    done = ask(tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.splitlines()[-1].endswith(b"has no config.json: not a model directory")


@pytest.mark.parametrize(
    ("logprobs", "complaint"),
    [
        ((-1.0, -2.0), ""),
        ((-1.0,), ""),
        ((), "no tokens"),
        ((-1.0, -9999.0), "no probability"),
        ((-1.0, float("nan")), "no probability"),
        ((-6.2, -6.2, -6.2), "equally likely"),
    ],
)
def test_what_no_sound_model_answers(logprobs: tuple[float, ...], complaint: str) -> None:
    found = golden_question.sanity_error(
        GoldenAnswer(pieces=("a",) * len(logprobs), logprobs=logprobs)
    )
    assert complaint in found
    assert bool(complaint) == bool(found)


@pytest.mark.parametrize(
    "response", [{}, {"choices": []}, {"choices": [{"logprobs": None}]}, {"error": "x"}]
)
def test_what_is_no_answer(response: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="golden question is none"):
        golden_question.read_answer(response, is_reference=False)
