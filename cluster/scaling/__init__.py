"""How many replicas a cluster needs, and of which role; see docs/autoscaling.md."""
