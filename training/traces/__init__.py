"""Traces: readers of the public formats, Trimtab's own form, composing, generating, summaries."""

from trimtab.training.traces.canonical_write import write_trace
from trimtab.training.traces.formats import READERS, detect_format, read_trace
from trimtab.training.traces.options import ReadOptions

__all__ = ["READERS", "ReadOptions", "detect_format", "read_trace", "write_trace"]
