"""Tests of the shipped list of repositories."""
