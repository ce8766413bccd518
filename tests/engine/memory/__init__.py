"""Tests of engine.memory: budgets, admission and pressure."""
