"""Traces, what-if, calibration and everything else that is done off line."""
