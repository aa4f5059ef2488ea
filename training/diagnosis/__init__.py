"""What is wrong with a run, why, and what would mend it (`trimtab diagnose`)."""
