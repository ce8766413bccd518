"""Tests of engines that transcribe and speak; they need mlx-audio."""
