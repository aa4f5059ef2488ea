"""The controller daemon: one process that steers several engines, one loop each."""
