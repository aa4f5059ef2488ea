"""A running vLLM as an `Engine`: its metrics in, its control socket out, in real time."""
