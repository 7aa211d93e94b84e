"""Sampling: the draw of tokens, and row processors, which change or read a row's logits."""
