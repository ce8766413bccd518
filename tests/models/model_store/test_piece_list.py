"""Hashes of pieces: computed while a file comes, in one go or after a restart, kept with it, and read from other Macs."""

import hashlib
import json
import random
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from models.hub.digests import BlobDigest
from models.model_store.partial_file import PartialFile, open_partial
from models.model_store.piece_list import PIECE_BYTES, PieceList, decode_list
from models.model_store.store import ModelStore
from tests.support.values import present

CONTENT = random.Random(3).randbytes(PIECE_BYTES) + b"the rest"
DIGEST = BlobDigest("sha256", hashlib.sha256(CONTENT).hexdigest())
HASHES = tuple(hashlib.sha256(p).hexdigest() for p in (CONTENT[:PIECE_BYTES], b"the rest"))
HEX = "ab" * 32


def test_a_file_that_came_in_two_runs_has_the_hashes_of_its_pieces(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, SystemClock())
    store.prepare()
    path = store.part_path(DIGEST)
    size, half = len(CONTENT), len(CONTENT) // 2

    def opened() -> PartialFile:
        part = present(open_partial(path, DIGEST, size=size, piece_bytes=5 << 20))
        while part.verify_next():
            pass
        return part

    with opened() as part:
        part.write(CONTENT[:half])
    part = opened()
    assert part.offset == half
    part.write(CONTENT[half:])
    assert part.seal().named == DIGEST
    assert part.piece_hashes == HASHES
    store.add_blob(path, DIGEST, DIGEST)
    store.write_pieces(DIGEST, part.piece_hashes)
    part.finish()
    part.close()
    model = store.publish("a/b", "c" * 40, {"w.safetensors": DIGEST}, ("*",))
    assert store.piece_list(model).files == {DIGEST.hex: HASHES}
    store.remove(model.name)
    assert list((store.blobs / "pieces").iterdir()) == []


def test_a_list_is_read_as_it_was_written_and_knows_where_pieces_start() -> None:
    listed = decode_list(PieceList({DIGEST.hex: HASHES}).encode())
    size = len(CONTENT)
    assert [listed.hash_at(DIGEST.hex, at, size) for at in (0, PIECE_BYTES)] == list(HASHES)
    assert listed.hash_at(DIGEST.hex, 1, size) == ""
    assert listed.hash_at(HEX, 0, size) == ""
    assert listed.hash_at(DIGEST.hex, 0, 2 * size) == "", "a list of another size is of no use"


@pytest.mark.parametrize("tree", [
    {},
    {"pieceBytes": PIECE_BYTES // 2, "files": {}},
    {"pieceBytes": PIECE_BYTES, "files": {"../x": [HEX]}},
    {"pieceBytes": PIECE_BYTES, "files": {HEX: ["short"]}},
    {"pieceBytes": PIECE_BYTES, "files": {HEX: [HEX] * 100_001}},
])  # fmt: skip
def test_what_is_no_list_of_pieces_is_refused(tree: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="pieces"):
        decode_list(json.dumps(tree).encode())
