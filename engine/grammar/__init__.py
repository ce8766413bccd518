"""Structured output: grammars for answers and tool calls, enforced by llguidance behind one interface."""
