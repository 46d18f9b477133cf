"""The demo on real vLLM: text appears, the request moves in mid-sentence, and no token changes."""

from midstream.api.demo.vllm.run import run

__all__ = ["run"]
