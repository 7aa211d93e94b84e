"""Control plane: HTTP in, placement, pools, lifecycle, command line. The only package that knows Ray."""
