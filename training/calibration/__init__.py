"""Calibration: fits the step-time model to tables of measured steps and reports its error."""
