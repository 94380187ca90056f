"""Frames, however their bytes come."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_connector.peer.base import PeerError
from kv_connector.peer.wire.frames import FrameReader, frame


@settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_a_frame_reader_takes_anything(data: bytes, cuts: list[int]) -> None:
    """However bytes are cut, the reader gives the same messages, or refuses them."""

    def read(parts: list[bytes]) -> list[Any]:
        reader, found = FrameReader(), []
        for part in parts:
            reader.feed(part)
            try:
                while (payload := reader.take()) is not None:
                    found.append(payload)
            except PeerError:
                return [*found, "refused"]
        return found

    frames = frame(b"a") + frame(b"") + data
    places = [0, *sorted(cuts), len(frames)]
    parts = [frames[a:b] for a, b in itertools.pairwise(places)]
    assert read(parts)[:2] == [b"a", b""]
    assert read(parts) == read([frames])
