"""Engines that step together: who steps in a turn, and what ends them all."""
