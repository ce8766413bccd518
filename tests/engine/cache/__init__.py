"""Tests of engine.cache: the block tree, the prefix cache, and layer caches."""
