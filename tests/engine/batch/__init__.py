"""Tests of engine.batch: scheduling, decoding, sampling, speculative decoding."""
