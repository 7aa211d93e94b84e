"""Row processors: concerns of sampling that change or read a row's logits, one module each."""
