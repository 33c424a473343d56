"""Replies to requests that are refused."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse


def refuse(error: HTTPException) -> JSONResponse:
    """Returns the reply of a refusal, in the form of OpenAI's errors."""
    body = {"error": {"message": error.detail, "code": error.status_code}}
    return JSONResponse(body, error.status_code, error.headers)
