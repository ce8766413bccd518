"""Schemes of quantization: the defaults of a mode, and what is refused."""

import pytest

from models import quantization
from models.quantization import QuantizationOrigin
from schemas.wire.stored_models import QuantizationMode, QuantizationRecipe


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [("affine", 4, 64), ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)],
)
def test_a_mode_has_its_bits_and_group_size(
    mode: QuantizationMode, bits: int, group_size: int
) -> None:
    scheme = quantization.choose_scheme(mode)
    assert (scheme.bits, scheme.group_size) == (bits, group_size)
    assert quantization.choose_scheme(mode, bits, group_size) == scheme


def test_a_recipe_has_the_bits_of_most_layers_and_a_name_of_its_own() -> None:
    scheme = quantization.choose_scheme("affine", None, 32, "mixed_3_6")
    assert (scheme.bits, scheme.group_size) == (3, 32)
    origin = QuantizationOrigin(repo="org/Tiny", commit="0" * 40, scheme=scheme)
    assert quantization.result_repo(origin) == "fleet/Tiny-000000000000-mixed_3_6-g32"


@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "recipe", "message"),
    [
        ("affine", 7, None, None, "bits 7 is not supported; choose one of 2, 3, 4, 5, 6, 8"),
        ("mxfp4", 8, None, None, "bits 8 is not supported with mode mxfp4; it is 4"),
        ("nvfp4", None, 64, None, "group size 64 is not supported with mode nvfp4; it is 16"),
        ("affine", 4, None, "mixed_4_6", "mixed_4_6 chooses mode and bits itself; leave bits out"),
        (
            "mxfp4",
            None,
            None,
            "mixed_4_6",
            "mixed_4_6 chooses mode and bits itself; leave mode mxfp4 out",
        ),
    ],
)
def test_values_without_kernels_are_refused(
    mode: QuantizationMode,
    bits: int | None,
    group_size: int | None,
    recipe: QuantizationRecipe | None,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        quantization.choose_scheme(mode, bits, group_size, recipe)
