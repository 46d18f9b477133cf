"""A command line of `vllm serve`, read as vLLM itself reads it: by engines and by the gateway's face alike."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from midstream.control.errors import BadInput

OWN: Final = (
    "api_key", "data_parallel_address", "data_parallel_rank", "data_parallel_size", "grpc_port", "host",
    "kv_transfer_config", "middleware", "scheduler_cls", "ssl_certfile", "ssl_keyfile", "uds", "worker_extension_cls",
)  # fmt: skip
"""What Midstream's own settings, moves and instances replace, and by what it enters an engine itself."""


class CommandLine:
    """A model and its flags. `args` are all of vLLM's, with `model` filled in."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Raises `BadInput` for what vLLM does not know and for what is Midstream's own to set."""
        self._parser = make_arg_parser(_Parser(prog="vllm serve"))
        try:
            self.args: Namespace = self._parser.parse_args(list(flags))
        except (KeyError, TypeError, ValueError) as error:
            raise not_taken(error) from error
        self.args.model = self.args.model_tag or self.args.model
        for name in OWN:
            if self.is_said(name):
                raise BadInput(f"--{name.replace('_', '-')} is Midstream's own to set")

    @property
    def names(self) -> tuple[str, ...]:
        """What clients call the model. The first is what its instances register."""
        return tuple(self.args.served_model_name or (self.args.model,))

    def is_said(self, name: str) -> bool:
        """Whether a flag is there and has another value than vLLM's usual one."""
        usual: Any = self._parser.get_default(name)
        return hasattr(self.args, name) and getattr(self.args, name) != usual


def not_taken(error: object) -> BadInput:
    """vLLM's own complaint as ours."""
    return BadInput(f"vLLM does not take these flags: {error}")


class _Parser(FlexibleArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise not_taken(message)
