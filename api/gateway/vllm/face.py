"""Serves vLLM's application for all models of a gateway inside a running event loop.

vLLM takes many seconds to import, so this module does not: the loop goes on while a thread does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.routing import Mount

from midstream.api.auth import Keyring
from midstream.api.closing import closing_of
from midstream.api.guards import HostGuard
from midstream.api.http_server import Served, serve
from midstream.api.keys import Key
from midstream.control.errors import BadInput

if TYPE_CHECKING:
    from midstream.api.gateway.vllm.client import CheckedGateway
    from midstream.api.gateway.vllm.served import ServedModel

BODY_BYTES_MAX = 8 * 1024 * 1024
OPEN_MAX = 2_048


class FaceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one face needs to know. `gateway` and `incarnation` make its request ids unique for ever."""

    gateway: str
    incarnation: int
    models: tuple[tuple[str, ...], ...]
    """The flags of `vllm serve`, once per model; the first answers requests that name none."""
    keys: tuple[Key, ...] = ()
    body_bytes_max: int = BODY_BYTES_MAX
    open_max: int = OPEN_MAX
    any_version: bool = False
    """Run on a vLLM that this face was not checked with."""


class VllmFace:
    """A listening face; `host` and `port` are what was bound."""

    def __init__(self, served: Served, app: Starlette, models: Sequence[ServedModel]) -> None:
        self._served = served
        self._app = app
        self.models = tuple(models)
        self.host = served.host
        self.port = served.port

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        return self._served.url

    async def wait(self) -> None:
        """Return when the server has ended."""
        await self._served.wait()

    async def stop(self) -> None:
        """Take no more requests, end the open ones with an explicit error, close. May be called twice."""
        closing_of(self._app).begin()
        for model in self.models:
            model.client.fail_all("shutdown", "the server is shutting down", "shutdown")
        await self._served.stop()
        for model in self.models:
            model.close()


async def serve_vllm_face(gateway: CheckedGateway, config: FaceConfig, host: str, port: int) -> VllmFace:
    """Load every model's configuration and tokenizer, bind `host:port` (0: any) and serve.

    Raises `BadInput` for an unfit vLLM, bad flags, two models of one name, no keys beyond loopback, a taken address.
    """
    keyring = Keyring(config.keys, host=host)
    version = await asyncio.to_thread(import_module, "midstream.api.gateway.vllm.version")
    await asyncio.to_thread(version.check_vllm, any_version=config.any_version)
    await asyncio.to_thread(import_module, "midstream.api.gateway.vllm.served")
    from midstream.api.gateway.vllm.served import ServedModel, freeze_gc_heap

    models = [await asyncio.to_thread(ServedModel, flags, gateway) for flags in config.models]
    names = [name for model in models for name in model.names]
    if len(set(names)) != len(names) or not names:
        raise BadInput(f"every served model needs a name of its own, got {', '.join(names) or 'none'}")
    for model in models:
        await model.open()
    freeze_gc_heap()
    app = _application(models, keyring, config)
    return VllmFace(await serve(app, host, port), app, models)


def _application(models: Sequence[ServedModel], keyring: Keyring, config: FaceConfig) -> Starlette:
    from midstream.api.gateway.vllm.errors import problem_response
    from midstream.api.gateway.vllm.front import Front, Limits

    app = Starlette()
    limits = Limits(body_bytes_max=config.body_bytes_max, open_max=config.open_max)
    front = Front(models, keyring, limits, closing_of(app), f"{config.gateway}-{config.incarnation}")
    app.router.routes.append(Mount("/", HostGuard(front, keyring.hosts, problem_response)))
    return app
