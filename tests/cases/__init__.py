"""Reported faults of serving engines: stock behaviour under the stock rules, ours under ours."""
