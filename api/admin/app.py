"""The admin API: its factory, which wires routes, errors and guards."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from midstream.api.admin import routes_cluster, routes_operations, routes_requests, routes_scaling
from midstream.api.admin.deps import AdminDeps, Deps, Reader
from midstream.api.admin.metrics import render
from midstream.api.admin.orders import API
from midstream.api.admin.parts import make_parts
from midstream.api.auth import Keyring, check_guarded
from midstream.api.closing import closing_of
from midstream.api.guards import BodyGuard, HostGuard
from midstream.api.problems import MEDIA_TYPE, Problem, ProblemBody, install_problems, problem_response
from midstream.control.errors import ArchiveUnavailable, LogUnavailable

_PROBLEM: Final[dict[str, Any]] = {"model": ProblemBody, "content": {MEDIA_TYPE: {}}, "description": "Problem"}
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {"4XX": _PROBLEM, "5XX": _PROBLEM}

meta: Final = APIRouter()


@meta.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(_: Reader, deps: Deps) -> Response:
    """Prometheus gauges of the cluster."""
    return Response(render(deps.follower), media_type=CONTENT_TYPE_LATEST)


@meta.get("/openapi.json", include_in_schema=False)
async def openapi(_: Reader, request: Request) -> JSONResponse:
    return JSONResponse(request.app.openapi())


def create_admin(deps: AdminDeps) -> FastAPI:
    """The app. Raises `BadInput` for no keys on another address than loopback."""
    app = FastAPI(title="Midstream admin API", version="1", openapi_url=None)
    app.state.deps = deps
    app.state.parts = make_parts(deps, closing_of(app))
    app.state.keyring = keyring = Keyring(deps.settings.keys, host=deps.settings.host)
    routers = (routes_cluster.router, routes_requests.router, routes_scaling.router, routes_operations.router, meta)
    for router in routers:
        check_guarded(router.routes)
        app.include_router(router, prefix=API, responses=RESPONSES)
    app.include_router(routes_cluster.open_router, prefix=API)
    install_problems(app)
    app.add_exception_handler(ArchiveUnavailable, _unavailable)
    app.add_exception_handler(LogUnavailable, _unavailable)
    app.add_middleware(BodyGuard, bytes_max=deps.settings.body_bytes_max, refuse=problem_response)
    app.add_middleware(HostGuard, hosts=keyring.hosts, refuse=problem_response)
    return app


async def _unavailable(_: Request, error: Exception) -> Response:
    code = "archive_unavailable" if isinstance(error, ArchiveUnavailable) else "log_unavailable"
    return problem_response(Problem(503, code, str(error), {"Retry-After": "1"}))
