"""The command `trimtab`."""
