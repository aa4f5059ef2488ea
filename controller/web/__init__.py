"""What the daemon shows over HTTP: dashboard, health, its own metrics, and the operator's door."""
