"""Pure placement: the memory proof, filters and scores. No clock, no I/O, no logging."""
