"""Tests of engine/input_workers/."""
