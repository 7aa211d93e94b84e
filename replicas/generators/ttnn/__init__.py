"""Llama, Mistral and Qwen on a Tenstorrent mesh, in ttnn; the only modules that import it."""
