"""Parts of `benchmarks.chaos`: what clients ask and see, and what is done to processes."""
