"""What `scripts.train_demo_model` is made of: corpus, tokenizer, network, training, evaluation."""
