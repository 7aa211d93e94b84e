"""The HTTP edge: OpenAI requests and answers, streams, and debugging routes. No Ray."""
