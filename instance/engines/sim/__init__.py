"""The simulated engine: real scheduling, real bytes in its KV, made-up arithmetic in place of a network."""
