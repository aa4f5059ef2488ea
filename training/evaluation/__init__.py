"""Paired evaluation: contenders on the same held-out traffic, and what their differences mean."""
