"""Router: runs each request on the engines of a cluster."""
