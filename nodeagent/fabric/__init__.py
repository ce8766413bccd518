"""The test of the cables between Macs: one child process for each rank, and the evaluation of its measurements."""
