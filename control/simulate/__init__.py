"""Deterministic simulation: production code on a virtual-time loop, under faults drawn from a seed."""
