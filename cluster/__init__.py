"""Control plane: HTTP in, placement, pools, command line. The only package that knows Ray."""
