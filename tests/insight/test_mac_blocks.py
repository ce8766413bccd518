"""Blocks of text with bars, as `fleetctl simulate` and `plan` show Macs."""

from insight.mac_blocks import MacBlock, MacEntry, blocks_text

GIB = 2**30


def test_a_block_has_a_bar_for_each_replica_what_pools_reserve_and_what_is_free() -> None:
    full = MacBlock(
        name="studio-1",
        chip="Apple M3 Ultra",
        offered_bytes=192 * GIB,
        reserved_bytes=32 * GIB,
        entries=(
            MacEntry(label="llama-0", size_bytes=96 * GIB),
            MacEntry(label="tiny-0", size_bytes=GIB, mark="+", note="does not answer"),
            MacEntry(label="gone-0", size_bytes=48 * GIB, mark="-"),
        ),
    )
    empty = MacBlock(name="mini-1", chip="Apple M4", offered_bytes=16 * GIB)
    lost = MacBlock(name="mini-2", chip="Apple M4", offered_bytes=16 * GIB, is_ready=False)
    assert (
        blocks_text([full, empty, lost])
        == """\
studio-1  Apple M3 Ultra, 192.0 GiB for models
  llama-0     96.0 GiB   50%  ████████████████████
+ tiny-0       1.0 GiB    1%  █  (does not answer)
- gone-0      48.0 GiB   25%  ░░░░░░░░░░
  reserved    32.0 GiB   17%  ▒▒▒▒▒▒▒  (by pools)
  free        63.0 GiB   33%  █████████████

mini-1  Apple M4, 16.0 GiB for models
  free        16.0 GiB  100%  ········································

mini-2  Apple M4, not reachable""".replace("33%  █████████████", "33%  ·············")
    )
    assert (full.has_changed, empty.has_changed) == (True, False)


def test_an_overcommitted_mac_has_nothing_free() -> None:
    entries = (MacEntry(label="big-0", size_bytes=20 * GIB),)
    block = MacBlock(name="mini", chip="Apple M4", offered_bytes=16 * GIB, entries=entries)
    assert blocks_text([block]).splitlines()[1:] == [
        "  big-0    20.0 GiB  125%  ████████████████████████████████████████",
        "  free          0 B    0%",
    ]
