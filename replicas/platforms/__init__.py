"""Platforms: the kinds of device that a worker computes on, one class each."""
