"""What is said where a server gives no answer, and whose certificates are accepted."""

from __future__ import annotations

import math
import os
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx2

from foretoken.backend.http_stream import said_in
from foretoken.errors import InputError

# What reading a list of models may raise.
NO_MODEL = (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError)

_SHORTEST_WAIT_S = 0.1


def authorities() -> ssl.SSLContext:
    """Whose certificates are accepted: those of the system, or of SSL_CERT_FILE or SSL_CERT_DIR in their place.

    Raises:
        InputError: a file of certificates that cannot be read.
    """
    try:
        return httpx2.create_ssl_context()
    except OSError as error:
        raise InputError("SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE"), f"cannot be read ({error})") from error


def why_no_model(error: Exception) -> str:
    """Why a list of models could not be read."""
    if isinstance(error, httpx2.HTTPStatusError):
        return f"status {error.response.status_code}: {said_of(error.response, error.response.text)}".removesuffix(": ")
    if isinstance(error, httpx2.HTTPError):
        known = {"timeout": "no answer in time", "connect": f"no connection: {explained(error)}"}
        return known.get(failure(error), repr(error))
    if isinstance(error, ValueError):
        return f"no JSON: {said_in(str(getattr(error, 'doc', error)))}"
    return "an empty list: it may still be loading" if isinstance(error, IndexError) else "no list of models"


def failure(error: httpx2.HTTPError) -> str:
    """Its code in a `Stream`."""
    if isinstance(error, httpx2.TimeoutException):
        return "timeout"
    return "connect" if isinstance(error, httpx2.ConnectError) else "cut"


def said_of(answer: httpx2.Response, body: str) -> str:
    """The same of an answer that is none; of a redirection where to, since none is followed: it would be timed too."""
    place = answer.headers.get("location")
    return said_in(body) if place is None or not answer.is_redirect else f"moved to {said_in(place)}: give that address"


def explained(error: httpx2.HTTPError) -> str:
    """What an error of the connection says, with the remedy where the server's certificate is refused."""
    said = str(error)
    if "CERTIFICATE_VERIFY_FAILED" not in said:
        return said
    return f"{said}; name the certificate of the authority that signed it in $SSL_CERT_FILE"


def retry_after_s(answer: httpx2.Response) -> float:
    """Seconds after which a server that has no room now may be asked again; 1 where it does not say so."""
    said = answer.headers.get("retry-after", "")
    try:
        wait_s = float(said)
    except ValueError:
        try:
            at = parsedate_to_datetime(said)
        except ValueError:
            return 1.0
        wait_s = (at.astimezone(UTC) - datetime.now(UTC)).total_seconds()
    return 1.0 if math.isnan(wait_s) else max(wait_s, _SHORTEST_WAIT_S)
