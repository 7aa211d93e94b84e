"""The process of an engine: its threads, sockets, logs, and its side of the parent's pipe."""
