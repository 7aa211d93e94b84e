"""The torch generator: Llama, Mistral, Qwen2 and Qwen3 on the CPU, with a paged KV cache."""
