"""Recorded workloads: when requests came, how long their prompts and outputs were. Never any text."""

from midstream.api.traces.load import TraceRow, load_trace, shipped_traces, window, write_trace

__all__ = ["TraceRow", "load_trace", "shipped_traces", "window", "write_trace"]
