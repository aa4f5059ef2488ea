"""What-if: the same recorded traffic under several policies or plans, paired and compared."""
