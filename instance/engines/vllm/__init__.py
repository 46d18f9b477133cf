"""The engine adapter for vLLM: an unpatched vLLM through its public seams."""
