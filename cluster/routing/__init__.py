"""Which engine runs what: what is known of them, who is next, and a request's way through."""
