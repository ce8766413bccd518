"""Tests of archives that install mlx-fleet."""
