"""The test of the cables between Macs: a child process for each rank, and what its numbers mean."""
