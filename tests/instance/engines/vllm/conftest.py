"""Nothing here is collected where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import warnings

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and vLLM warn of themselves while they are imported
        import midstream.instance.engines.vllm.seams.host  # noqa: F401
