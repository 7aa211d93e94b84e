"""Formats of tool calls and reasoning in the output of model families. Pure."""
