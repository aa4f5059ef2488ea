"""Four incidents that people who share an engine have reported: each on stock rules and on ours."""
