"""Measurements, each a module with `measure`; `midstream.api.cli.benches` has a command for each."""
