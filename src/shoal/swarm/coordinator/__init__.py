"""The coordinator: identity, leases, submissions, verdicts, ledger, credit, batches. Starts without torch."""
