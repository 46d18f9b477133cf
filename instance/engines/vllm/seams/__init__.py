"""Every touch of a vLLM internal. Nothing outside this package reads or writes one.

`version` says which vLLM this was checked with and refuses others; `core` is about requests and queues of a
scheduler and `blocks` about its KV cache manager, `worker` about model runner and KV memory, `host` about
starting a core and talking to it.
"""
