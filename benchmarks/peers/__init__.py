"""Who benchmarks compare with: engines and proxies that they start themselves."""
