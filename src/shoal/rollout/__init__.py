"""The rollout worker: gets leases, generates rows with proofs, submits them.

worker/     the process: leases, weights, uploads, heartbeats
engine/     generates rows from weights and prompts
adversary/  dishonest behaviours for tests and demos; nothing in worker/ or engine/ imports it
"""
