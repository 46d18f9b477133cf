"""Midstream moves running LLM requests between vLLM instances and logs every decision as a fact.

The packages live in the repository's top-level folders and are reached as `midstream.control`,
`midstream.instance`, `midstream.migration`, `midstream.api` and `midstream.migrations`.
"""

__version__ = "0.1.0"
