"""What-if of a fleet: several replayed engines behind the gateway's routing rules."""
