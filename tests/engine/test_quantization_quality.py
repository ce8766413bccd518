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
def test_more_bits_are_nearer_to_a_real_model(smollm2: Path, tmp_path: Path) -> None:
    source, converter = smollm2 / MODEL, module("engine.quantize.converter")
    near, far = (tmp_path / "8", tmp_path / "3")
    for folder in (near, far):
        converter.quantize(source, folder, choose_scheme("affine", int(folder.name)))
    eight, three = measured(source, near), measured(source, far)
    assert eight.original_perplexity == three.original_perplexity
    assert 3 < present(eight.original_perplexity) < 60
    assert present(eight.perplexity) < 1.03 * present(eight.original_perplexity)
    assert present(three.perplexity) > 1.2 * present(eight.perplexity)
    assert present(eight.top1_agreement) > 0.95 > present(three.top1_agreement)
    assert present(eight.mean_kl_divergence) < 0.02 < present(three.mean_kl_divergence)
