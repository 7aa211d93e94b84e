"""Gangs: engines that step in lockstep. Coordination of turns and handling of a lost rank."""
