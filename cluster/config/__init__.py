"""Configuration: what a person writes, and the one frozen value that each process makes of it."""
