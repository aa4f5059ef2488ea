"""Faults of everything around a controller, on a real deployment."""
