"""PRIME-RL: accepted groups become the next policy version. Batch, advantage, packing, loss, optimiser, checkpoint, loop."""
