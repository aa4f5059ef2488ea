"""Who sent what when a tier became slow: a short look at a stretch of an engine's traffic log."""
