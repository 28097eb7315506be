"""One exchange with upstream over HTTP: a batch out, its answer back. Blocks, and is imported where a url is set."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass
from pathlib import Path

import urllib3
import zstandard

from appliance.adapters.outbound import Pools, bearer, why
from appliance.adapters.tls import Calling
from models import sync

_CONNECT_S, _READ_S, _WHOLE_S = 10.0, 60.0, 180.0
_LEVEL = 3
_LARGEST_BYTES = 16 * 2**20
"""Of an answer, unpacked."""
_CHUNK_BYTES = 64 * 1024
_HEADERS_BYTES = 600
"""Of a request and its answer together, about; what TLS and TCP take is not counted."""
_NOT_SENT = (
    urllib3.exceptions.NewConnectionError,
    urllib3.exceptions.ConnectTimeoutError,
    urllib3.exceptions.SSLError,
    urllib3.exceptions.ProxyError,
    urllib3.exceptions.LocationParseError,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a batch."""

    status: int = 0
    """Of HTTP; 0 where no answer came."""
    content: bytes = b""
    retry_after_s: float | None = None
    """What the server asks for."""
    reason: str = ""
    """Why no answer came."""
    unsure: bool = False
    """Whether the batch may have been taken although no answer came."""
    moved_bytes: int = 0
    """Both ways."""


class Exchanges:
    """With one server, over connections that are kept open."""

    def __init__(self, url: str, tls: Calling, token_file: Path | None = None) -> None:
        """Send to `url`; the files are read again when they have changed."""
        self._url, self._tls, self._token_file = f"{url.rstrip('/')}{sync.PATH}", tls, token_file
        self._stamps: tuple[int, ...] | None = None
        self._pools = Pools(1)

    def __call__(self, document: bytes) -> Reply:
        """Send the JSON of a batch."""
        content = zstandard.ZstdCompressor(level=_LEVEL).compress(document)
        moved_bytes = 0
        try:
            headers, pools = self._headers(), self._current()
            moved_bytes = len(content) + _HEADERS_BYTES
            response = pools.to(self._url).request(
                "POST",
                self._url,
                body=content,
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=_READ_S),
                retries=False,
                redirect=False,
                preload_content=False,
            )
            with contextlib.closing(response):
                packed = _read(response)
                moved_bytes += len(packed)
                body = _unpacked(packed) if response.headers.get("content-encoding") == "zstd" else packed
                retry_after_s = _seconds(response.headers.get("retry-after", ""))
                response.drain_conn()  # the connection serves again
                return Reply(response.status, body, retry_after_s, moved_bytes=moved_bytes)
        except _NOT_SENT as error:
            return Reply(reason=why(error), moved_bytes=0)
        except (urllib3.exceptions.HTTPError, zstandard.ZstdError, ValueError) as error:
            return Reply(reason=why(error), unsure=True, moved_bytes=moved_bytes)
        except OSError as error:  # a file of ours
            return Reply(reason=why(error))

    def close(self) -> None:
        """Let go of the connections."""
        self._pools.close()

    def _headers(self) -> dict[str, str]:
        headers = {
            "content-type": "application/json",
            "content-encoding": "zstd",
            "accept-encoding": "zstd",
            "accept": "application/json",
        }
        if self._token_file:
            headers["authorization"] = bearer(self._token_file)
        return headers

    def _current(self) -> Pools:
        """Connections that show the certificate which is there now."""
        files = [path for path in (self._tls.ca, self._tls.certificate, self._tls.key) if path]
        stamps = tuple(path.stat().st_mtime_ns for path in files)
        if stamps != self._stamps:
            self._pools.close()
            self._pools, self._stamps = Pools(1, self._tls.context()), stamps
        return self._pools


def _read(response: urllib3.BaseHTTPResponse) -> bytes:
    give_up_at, content = time.monotonic() + _WHOLE_S, bytearray()
    while chunk := response.read1(_CHUNK_BYTES, decode_content=False):
        content += chunk
        if len(content) > _LARGEST_BYTES or time.monotonic() > give_up_at:
            msg = f"the answer has more than {_LARGEST_BYTES} bytes, or takes more than {_WHOLE_S:g} s"
            raise ValueError(msg)
    return bytes(content)


def _unpacked(packed: bytes) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)) as reader:
        content = reader.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        msg = f"the answer has more than {_LARGEST_BYTES} bytes"
        raise ValueError(msg)
    return content


def _seconds(text: str) -> float | None:
    """Of the header Retry-After; a date is not taken, because no clock of a device is believed for that."""
    return float(text) if text.isdecimal() else None
