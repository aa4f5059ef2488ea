"""What a run costs, who pays for it, and what a tier's reserve costs the others."""
