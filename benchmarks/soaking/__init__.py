"""Parts of `benchmarks.soak`: the load, samples of processes, leaks, growth."""
