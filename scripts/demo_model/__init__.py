"""Parts of `scripts.train_demo_model`: corpus, tokenizer, network, training, evaluation."""
