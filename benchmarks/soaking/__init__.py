"""Parts of `benchmarks.soak`: the load, the processes, what must be empty, what growth is."""
