"""Deployment configurations and the demo model, as package data so that they are found wherever ttserve runs."""
