"""Running a cluster on Ray Serve and on a host: deployments, the local server, checks of a host."""
