"""The golden question: the answer of one process equals an engine's."""

import subprocess
import sys
from pathlib import Path

import pytest

from models import golden_question
from schemas.formation import GoldenAnswer
from schemas.wire.engine_config import EngineConfig
from tests.support.engine_process import Engine

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


def ask(model: Path) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "engine.golden"]
    document = EngineConfig(model_dir=model).to_json()
    return subprocess.run(command, input=document, capture_output=True, check=False, timeout=100)


@pytest.mark.ci
def test_one_process_answers_as_an_engine_does(tiny: Path, engine: Engine) -> None:
    done = ask(tiny)
    assert done.returncode == 0, done.stderr
    answer = GoldenAnswer.model_validate_json(done.stdout)
    assert answer.is_reference
    assert len(answer.pieces) == golden_question.MAX_TOKENS
    response = engine.post(golden_question.PATH, **golden_question.request_body("tiny")).json
    other = golden_question.read_answer(response, is_reference=False)
    assert other.pieces == answer.pieces
    assert other.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    assert golden_question.sanity_error(other) == ""


def test_a_broken_model_has_no_answer(tmp_path: Path) -> None:
    done = ask(tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.splitlines()[-1].endswith(b"has no config.json: not a model directory")
