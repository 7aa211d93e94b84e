"""The deterministic simulator: the production cores under a virtual clock, and its reports."""
