"""A cluster's life on Ray Serve and on a host: deployments, a local server, what is installed."""
