"""Tuning: the static plan that serves given traffic best, within the plan's own bounds."""
