"""The laboratory: simulator, chaos and workloads. Nothing that serves imports it."""
