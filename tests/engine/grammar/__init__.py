"""Tests of engine.grammar: allowed and refused grammars, and outputs that match their schemas."""
