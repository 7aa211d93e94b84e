"""The HTTP edge: OpenAI bodies in and out, streams, what is shown of the cluster; no Ray."""
