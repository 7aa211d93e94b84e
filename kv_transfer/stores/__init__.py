"""Stores of KV units for the engines of a node or a cluster; none imports another."""
