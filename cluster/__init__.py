"""Control plane: HTTP, routing, pools, command line. The only package that imports Ray."""
