"""The replay engine: vLLM V1 simulated step by step under the fair or the stock rules."""
