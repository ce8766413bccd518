"""Tests of the recorder: its state, its access, and its process."""
