"""Whether a body is JSON that kvgate can read, and its decoded bytes if so.

The engine always gets the original bytes. A compressed body is expanded here only to read
it, and only up to a cap, so that a small body cannot claim gigabytes of memory.
"""

from __future__ import annotations

import zlib

_ZLIB_WINDOW = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_UTF8_BOM = b"\xef\xbb\xbf"


def readable_json(
    body: bytes, content_type: str, content_encoding: str, max_decoded_bytes: int
) -> bytes | None:
    """JSON bytes of the body; None when it is something else or expands past the cap.

    A missing content type is taken for JSON, as engines do.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        return None
    encoding = content_encoding.strip().lower()
    if encoding in ("", "identity"):
        return body.removeprefix(_UTF8_BOM)
    window = _ZLIB_WINDOW.get(encoding)
    if window is None:
        return None
    decoder = zlib.decompressobj(window)
    try:
        plain = decoder.decompress(body, max_decoded_bytes)
    except zlib.error:
        return None
    # Anything behind the end (a second gzip member) is read by the engine but not here.
    whole = decoder.eof and not decoder.unused_data
    return plain.removeprefix(_UTF8_BOM) if whole else None
