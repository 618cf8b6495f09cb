"""The two halves of the swarm: coordinator (no torch) and validator. Imports nothing."""
