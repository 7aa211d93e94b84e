"""Workloads: public traces and synthetic ones, read into one form that a client can replay."""
