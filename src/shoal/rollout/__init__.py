"""The worker: an engine that generates, and a loop that leases, generates, submits. docs/worker.md has the rest."""
