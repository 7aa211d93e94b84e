"""The HTTP interface of operators: calls that show and change a cluster, on a port of its own."""
