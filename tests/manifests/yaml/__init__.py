"""Tests of `manifests.yaml`."""
