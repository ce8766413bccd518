"""The nearness of quantized models to their originals, of models without and with meaning."""

from pathlib import Path
from typing import Any

import pytest

from machinery.clock import SystemClock
from models.quantization import choose_scheme
from schemas.wire.stored_models import QuantizationQuality
from tests.support.mlx_models import module
from tests.support.models import MODEL
from tests.support.values import present

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(900)]


def measured(source: Path, result: Path, memory: int = 1 << 40) -> QuantizationQuality:
    found: QuantizationQuality = module("engine.quantize.quality").measure(
        source, result, memory, SystemClock()
    )
    return found


def test_a_model_that_does_not_fit_says_why_it_was_not_measured(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    quality = measured(tmp_path, tmp_path, 1 << 30)
    assert quality.tokens == 0
    assert quality.summary == (
        "not measured: the original takes 3.0 GiB to run, and 1.0 GiB are available"
    )


def test_the_divergence_is_that_of_the_probabilities() -> None:
    quality: Any = module("engine.quantize.quality")
    np: Any = module("numpy")
    first, second = np.log([[0.5, 0.25]]), np.log([[0.25, 0.25]])
    # 0.5 ln 2 + 0 + 0.25 ln (0.25 / 0.5)
    expected = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert quality._divergence(first, second)[0] == pytest.approx(expected)
    assert quality._divergence(first, first)[0] == 0


@pytest.mark.ci
def test_eight_bits_are_near_to_a_real_model(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module("engine.quantize.quality"), "_MAX_TOKENS", 129)
    source, result = smollm2 / MODEL, tmp_path / "8"
    module("engine.quantize.converter").quantize(source, result, choose_scheme("affine", 8))
    quality = measured(source, result)
    original = present(quality.original_perplexity)
    assert (quality.tokens, original < 500) == (128, True)
    assert 0.97 < present(quality.perplexity) / original < 1.03
    assert 0.93 < present(quality.top1_agreement) <= 1
    assert 0 < present(quality.mean_kl_divergence) < 0.01
