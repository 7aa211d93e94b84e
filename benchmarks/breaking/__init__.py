"""Parts of `benchmarks.chaos`: clients that check answers, and faults of processes."""
