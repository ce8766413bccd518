"""Tests of the maintenance of Macs."""
