"""Transports of messages and chunks; none imports another except `faulty`, which extends `zmq`."""
