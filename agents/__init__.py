"""Policies: telemetry in, proposed allocation out."""
