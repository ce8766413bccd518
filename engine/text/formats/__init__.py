"""Answer formats of model families: how each writes reasoning, text and tool calls."""
