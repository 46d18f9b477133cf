"""Refusals and failures of the gateway as errors of vLLM's own kind, which its application answers in its own form."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve import create_error_response
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMError, VLLMValidationError

from midstream.api.problems import Problem
from midstream.control.errors import Refused

RETRY_AFTER_S: Final = 1

CLIENT_CODES: Final = frozenset({"too_long", "bad_request"})
"""Refusals that repeating the request cannot heal: vLLM's validation error, a 400."""

STATUS: Final[Mapping[str, HTTPStatus]] = {
    "cancelled": HTTPStatus.SERVICE_UNAVAILABLE,
    "deadline": HTTPStatus.GATEWAY_TIMEOUT,
    "draining": HTTPStatus.SERVICE_UNAVAILABLE,
    "duplicate": HTTPStatus.CONFLICT,
    "no_capacity": HTTPStatus.SERVICE_UNAVAILABLE,
    "overloaded": HTTPStatus.TOO_MANY_REQUESTS,
    "shutdown": HTTPStatus.SERVICE_UNAVAILABLE,
    "tenant_queue_full": HTTPStatus.TOO_MANY_REQUESTS,
}
"""HTTP status by code of the gateway's refusals and errors; everything else is a 500."""


class Unserved(GracefulHTTPError, GenerationError):
    """The gateway refused or gave up a request.

    vLLM's `generate()` lets a `GracefulHTTPError` pass unchanged, and its stream writers turn a `GenerationError`
    into an explicit error event; being both keeps status and text on either path.
    """

    def __init__(self, code: str, reason: str) -> None:
        status = STATUS.get(code, HTTPStatus.INTERNAL_SERVER_ERROR)
        super().__init__(f"{code}: {reason}", status)
        self.status_code = status
        self.code = code


def error_of(code: str, reason: str) -> VLLMError:
    """The error that a waiting client gets for a failed or refused request."""
    if code in CLIENT_CODES:
        return VLLMValidationError(f"{code}: {reason}")
    return Unserved(code, reason)


def error_of_refusal(refused: Refused) -> VLLMError:
    """As `error_of`."""
    return error_of(refused.code, refused.reason)


def problem_response(problem: Problem, param: str | None = None) -> Response:
    """A problem found before vLLM's application was asked, in the form of that application."""
    status = HTTPStatus(problem.status)
    error = create_error_response(problem.detail, status.phrase, status, param)
    headers = dict(problem.headers)
    if status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return JSONResponse(error.model_dump(), status_code=status, headers=headers)
