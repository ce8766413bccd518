"""Tests of the node agent: pure parts on captured output, readers on this machine."""
