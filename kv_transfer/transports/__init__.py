"""Ways to carry messages and chunks. Transports do not know each other."""
