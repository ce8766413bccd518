"""Tests of manifests/."""
