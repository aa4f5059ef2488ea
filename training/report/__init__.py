"""Reports for people: one self-contained HTML file a result."""
