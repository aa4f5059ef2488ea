"""The operator's side: the command line and the daemon."""
