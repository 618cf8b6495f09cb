"""The policy: its shape, forward pass, weights, log-probs and tokenizer. Importing the package does not import torch."""
