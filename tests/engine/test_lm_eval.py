"""lm-evaluation-harness as a judge: it gets the same figures from an engine as from mlx-lm's own evaluation."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.engine_process import Engine
from tests.support.models import MODEL

pytestmark = [pytest.mark.full, pytest.mark.mlx, pytest.mark.timeout(600)]

# `make test-full` creates it.
PYTHON = Path(__file__).parents[2] / ".venv-lm-eval" / "bin" / "python"
JUDGE = Path(__file__).parents[1] / "support" / "lm_eval_judge.py"


def test_both_ways_to_evaluate_a_model_agree(real: Engine, smollm2: Path, tmp_path: Path) -> None:
    assert PYTHON.exists(), f"{PYTHON} is not there; run `make .venv-lm-eval/.ready`"
    done = subprocess.run(
        [PYTHON, JUDGE, smollm2 / MODEL, real.url],
        env={**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = figures["api"], figures["mlx-lm"]
    assert ours["accuracy"] == theirs["accuracy"] > 0.5
    assert ours["texts"] == theirs["texts"]
    assert all(ours["texts"])
    for mine, other in zip(ours["likelihoods"], theirs["likelihoods"], strict=True):
        assert mine == pytest.approx(other, abs=1e-3)
    assert ours["greedy"] == theirs["greedy"]
