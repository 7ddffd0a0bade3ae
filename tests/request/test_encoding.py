"""BP3: what can be read as JSON, and what only passes through."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.encoding import readable_json

BODY = b'{"model": "sim", "prompt": "' + b"x" * 500 + b'"}'
CAP = 10_000


def read(
    body: bytes, content_type: str = "application/json", encoding: str = "", cap: int = CAP
) -> bytes | None:
    return readable_json(body, content_type, encoding, cap)


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


class TestContentType:
    @pytest.mark.parametrize(
        "content_type",
        ["", "application/json", "application/json; charset=utf-8", " Application/JSON ",
         "application/vnd.api+json", ";charset=utf-8"],
    )  # fmt: skip
    def test_json_and_silence_are_json(self, content_type: str) -> None:
        assert read(BODY, content_type) == BODY

    @pytest.mark.parametrize(
        "content_type",
        ["multipart/form-data; boundary=x", "text/plain", "application/x-ndjson", "json"],
    )
    def test_everything_else_is_not_read(self, content_type: str) -> None:
        assert read(BODY, content_type) is None


class TestContentEncoding:
    @pytest.mark.parametrize("encoding", ["", "identity", " Identity "])
    def test_an_unencoded_body_is_itself(self, encoding: str) -> None:
        assert read(BODY, encoding=encoding) == BODY

    @pytest.mark.parametrize("encoding", ["gzip", "x-gzip", " GZIP"])
    def test_gzip_is_decoded(self, encoding: str) -> None:
        assert read(gzip.compress(BODY), encoding=encoding) == BODY

    def test_deflate_is_decoded(self) -> None:
        assert read(zlib.compress(BODY), encoding="deflate") == BODY

    @pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip", "compress"])
    def test_an_unknown_encoding_is_not_read(self, encoding: str) -> None:
        assert read(BODY, encoding=encoding) is None

    @pytest.mark.parametrize(
        "body",
        [b"", BODY, gzip.compress(BODY)[:-1], gzip.compress(BODY)[:20], zlib.compress(BODY)],
        ids=["empty", "plain", "no trailer", "cut", "zlib"],
    )
    def test_what_is_not_whole_gzip_is_not_read(self, body: bytes) -> None:
        assert read(body, encoding="gzip") is None

    def test_raw_deflate_is_not_guessed(self) -> None:
        assert read(raw_deflate(BODY), encoding="deflate") is None

    @pytest.mark.parametrize("behind", [gzip.compress(b"1}"), b"junk"])
    def test_bytes_behind_the_first_member_are_not_left_out(self, behind: bytes) -> None:
        """The engine would read on, so what the first member says is not the request."""
        assert read(gzip.compress(b'{"model": "a"}') + behind, encoding="gzip") is None


class TestCap:
    @pytest.mark.parametrize(("over", "readable"), [(-1, True), (0, True), (1, False)])
    def test_a_body_may_expand_to_the_cap_and_no_further(self, over: int, readable: bool) -> None:
        body = b"x" * (CAP + over)
        assert (read(gzip.compress(body), encoding="gzip") == body) is readable
        assert (read(gzip.compress(body), encoding="gzip") is None) is not readable

    def test_a_bomb_takes_no_more_memory_than_the_cap(self) -> None:
        bomb = gzip.compress(bytes(10 * 1024 * 1024))
        assert len(bomb) < 11_000
        tracemalloc.start()
        try:
            assert read(bomb, encoding="gzip", cap=100_000) is None
            assert tracemalloc.get_traced_memory()[1] < 300_000
        finally:
            tracemalloc.stop()


class TestByteOrderMark:
    def test_a_leading_mark_is_dropped(self) -> None:
        assert read(b"\xef\xbb\xbf" + BODY) == BODY
        assert read(gzip.compress(b"\xef\xbb\xbf" + BODY), encoding="gzip") == BODY

    def test_only_one_and_only_in_front(self) -> None:
        assert read(b"\xef\xbb\xbf\xef\xbb\xbf1") == b"\xef\xbb\xbf1"
        assert read(b"1\xef\xbb\xbf") == b"1\xef\xbb\xbf"


@given(body=st.binary(), encoding=st.sampled_from(["gzip", "deflate", "", "zstd"]))
def test_no_body_raises(body: bytes, encoding: str) -> None:
    plain = read(body, encoding=encoding)
    assert plain is None or len(plain) <= max(len(body), CAP)
