"""What `trimtab doctor` looks at: an installation, engines with their controller, a gateway.

Each look gives findings. Nothing here changes anything, takes a lease, or sends a request that an
engine computes for.
"""
