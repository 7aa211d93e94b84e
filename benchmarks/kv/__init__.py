"""Parts of ``benchmarks.kv_transfer``."""
