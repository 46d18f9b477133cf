"""vLLM's own OpenAI application over the gateway's core.

Everything above vLLM's engine core (templates, tokenizer, parsers, detokeniser, stop strings, logprobs, usage) is
vLLM's own code and runs here, so it never moves; instead of an engine core it talks to `api.gateway.gateway`.
"""
