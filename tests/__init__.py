"""Tests of mlx-fleet, on real parts."""
