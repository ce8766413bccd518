"""Tests of services: the contract, the adapters, and the changes of the machine."""
