"""Every published number has its script here; `--quick` runs it in under a minute."""
