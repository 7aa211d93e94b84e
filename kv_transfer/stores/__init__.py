"""Places that keep KV units for the engines of a node or a cluster. They do not know each other."""
