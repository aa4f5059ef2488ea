"""The fair scheduler's rules as small pure decisions, one file a rule or two.

The replay calls them compiled, the vLLM plug-in calls the same functions from Python. They hold no
engine: no queues of requests, no blocks, no clock.
"""
