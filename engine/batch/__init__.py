"""Tokens are made here: prefill, decode, sampling, in one thread and in step on all ranks of a group."""
