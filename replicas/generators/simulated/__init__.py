"""The simulated mesh: costs what a TT mesh costs, computes token ids that tell every KV bug."""
