"""Training of targets and drafters: corpus, tokenizer, losses, trainer, evaluation."""
