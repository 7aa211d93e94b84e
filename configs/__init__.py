"""Deployment configurations and the demo model, found wherever ttserve is installed."""
