"""Learning a policy from traces: episodes, the training loop, its record, and promotion."""
