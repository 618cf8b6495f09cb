"""The policy: its shape, forward pass, weights, log-probs and tokenizer. Torch is imported by the files, not here."""
