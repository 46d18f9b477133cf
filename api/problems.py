"""Errors of the HTTP faces as values, and their RFC 9457 form (`application/problem+json`)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

MEDIA_TYPE = "application/problem+json"

STATUS_CODES: Mapping[int, str] = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}
"""Machine-readable codes of the errors that the web framework raises itself."""

logger = structlog.get_logger(__name__)


class Problem(Exception):
    """A request that is answered with an error: `code` is stable, `detail` is for people."""

    def __init__(self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = dict(headers or {})


class ProblemBody(BaseModel):
    """RFC 9457 problem details; `code` is what a program should look at."""

    type: str
    title: str
    status: int
    detail: str
    code: str


def problem_body(problem: Problem) -> dict[str, Any]:
    """The members of a problem document."""
    return {
        "type": f"urn:midstream:problem:{problem.code}",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
        "code": problem.code,
    }


def problem_response(problem: Problem) -> Response:
    """A problem as an HTTP response."""
    return JSONResponse(
        problem_body(problem), status_code=problem.status, headers=problem.headers, media_type=MEDIA_TYPE
    )


def from_http(error: HTTPException) -> Problem:
    """The problem behind an error that the framework raised: unknown route, wrong method, too large a body."""
    code = STATUS_CODES.get(error.status_code, "http_error")
    return Problem(error.status_code, code, str(error.detail), error.headers)


def from_validation(error: RequestValidationError) -> Problem:
    """Input that does not fit its declared form: where and why, never the input itself."""
    errors = error.errors()
    if any(e["type"] == "json_invalid" for e in errors):
        return Problem(400, "malformed_json", "the body is not JSON")
    text = "; ".join(f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in errors[:5])
    if any(e["loc"][:2] == ("header", "Idempotency-Key") for e in errors):
        return Problem(400, "idempotency_key_required", text)
    return Problem(422, "invalid_input", text)


def install_problems(app: FastAPI) -> None:
    """Make every error of the app a problem document."""

    async def on_problem(_: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return problem_response(error)

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem_response(from_http(error))

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_response(from_validation(error))

    async def on_bug(_: Request, error: Exception) -> Response:
        logger.error("request failed", error=repr(error), exc_info=error)
        return problem_response(Problem(500, "internal_error", "the server failed; see its log"))

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_bug)
