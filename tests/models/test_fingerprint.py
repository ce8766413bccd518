"""The fingerprint of a model folder."""

from pathlib import Path

from models import fingerprint


def test_a_fingerprint_changes_with_the_weights_and_the_settings(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 9000)
    plain = fingerprint.compute(tmp_path, (None, 4))
    assert fingerprint.compute(tmp_path, (None, 4)) == plain
    assert fingerprint.compute(tmp_path, (None, 8)) != plain
    weights.write_bytes(b"\0" * 8999 + b"\1")
    assert fingerprint.compute(tmp_path, (None, 4)) != plain
    assert fingerprint.compute(tmp_path / "gone", ()).startswith("fp_")
