"""Groups as bytes: exact round trips, one encoding for one content, and refusal of everything else."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.buffer.wire import SCHEMA, decode_group, digest_of, encode_group
from miles.errors import GroupRefused
from miles.types import Group, Sample, Segment

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    mask = (True, *draw(st.lists(st.booleans(), max_size=5)))
    ids = [draw(st.integers(0, 2**31 - 1)) for _ in mask]
    return Segment(
        tuple(ids),
        mask,
        tuple(draw(finite) if sampled else 0.0 for sampled in mask),
        tuple(draw(st.integers(0, 2**40)) if sampled else -1 for sampled in mask),
    )


samples = st.builds(
    Sample,
    segments=st.lists(segments(), min_size=1, max_size=2).map(tuple),
    stop_reason=st.sampled_from(["stop", "length"]),
    text=st.text(),
    reward=st.none() | finite,
    reward_parts=st.dictionaries(st.text(), st.none() | finite, max_size=3),
    extras=st.dictionaries(st.text(), st.binary() | st.lists(st.integers(-5, 5)) | finite, max_size=2),
)
groups = st.builds(
    Group,
    ordinal=st.integers(0, 2**60),
    row=st.integers(0, 2**60),
    samples=st.lists(samples, min_size=1, max_size=3).map(tuple),
    prompt_text=st.text(),
    baseline_reward=st.none() | finite,
)


@given(groups)
@settings(max_examples=150, deadline=None)
def test_round_trip_is_exact(group: Group) -> None:
    frame = encode_group(group)
    decoded = decode_group(frame.payload, frame.digest)
    assert decoded == group
    assert encode_group(decoded) == frame


def test_equal_content_has_one_encoding(make_group: Callable[..., Group]) -> None:
    group = make_group(1, 1)
    first, second = group.samples
    same = dataclasses.replace(
        group,
        samples=(
            dataclasses.replace(first, reward=0, reward_parts={"b": 1, "a": 2.0}),  # an int where a float is declared
            dataclasses.replace(second, reward_parts={}),
        ),
    )
    other = dataclasses.replace(
        group,
        samples=(
            dataclasses.replace(first, reward=0.0, reward_parts={"a": 2, "b": 1.0}),
            dataclasses.replace(second, reward_parts={}),
        ),
    )
    assert encode_group(same) == encode_group(other)


def changed(group: Group, **fields: Any) -> Group:
    """The group with fields of its first segment replaced."""
    segment = dataclasses.replace(group.samples[0].segments[0], **fields)
    return dataclasses.replace(
        group, samples=(dataclasses.replace(group.samples[0], segments=(segment,)), *group.samples[1:])
    )


BAD_SEGMENTS = [
    ({"token_ids": (5, 1, 2)}, "3 token_ids but 4 loss_mask, 4 behavior_logprobs and 4 versions"),
    ({"behavior_logprobs": (0.0, -1.0, -1.0)}, "4 token_ids but 4 loss_mask, 3 behavior_logprobs"),
    ({"versions": (-1, 0, 0, 0, 0)}, "5 versions: all four must have one length"),
    ({"loss_mask": (False, True, True)}, "3 loss_mask"),
    ({"behavior_logprobs": (0.0, -1.0, float("nan"), -1.0)}, r"behavior_logprobs\[2\] is nan: it must be finite"),
    ({"behavior_logprobs": (0.0, float("-inf"), -1.0, -1.0)}, r"behavior_logprobs\[1\] is -inf"),
    ({"token_ids": (5, 1, -1, 2)}, r"token id -1 at 2 is outside of \[0, 2147483648\)"),
    ({"token_ids": (5, 1, 2**31, 2)}, "token id 2147483648 at 2"),
    ({"token_ids": (5, 1, 2**70, 2)}, "cannot be stored"),
    ({"token_ids": (5, 1, 2.5, 2)}, "cannot be stored"),
    ({"token_ids": (5, 1, "2", 2)}, "cannot be stored"),
    ({"token_ids": (5, 1, True, 2)}, "cannot be stored"),
    ({"versions": (-1, 0, -1, 0)}, "token 2 was sampled, but its version is -1"),
    ({"versions": (0, 0, 0, 0)}, "token 0 was not sampled, so its version must be -1"),
    ({"behavior_logprobs": (-0.5, -1.0, -1.0, -1.0)}, "token 0 was not sampled.*-1 and -0.5"),
    ({"token_ids": (), "loss_mask": (), "behavior_logprobs": (), "versions": ()}, "at least 1"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_SEGMENTS)
def test_bad_segments_are_refused(make_group: Callable[..., Group], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GroupRefused, match=f"ordinal 3.*{message}"):
        encode_group(changed(make_group(3, 3), **fields))


def test_bad_groups_are_refused(make_group: Callable[..., Group]) -> None:
    group = make_group(3, 3)
    first = group.samples[0]
    silent = Sample((Segment((5,), (False,), (0.0,), (-1,)),), "stop", "")
    cases = [
        (dataclasses.replace(group, samples=()), "the group has no samples"),
        (dataclasses.replace(group, ordinal=-1), "ordinal -1: ordinal and row must not be negative"),
        (dataclasses.replace(group, row=-2), "row is -2"),
        (dataclasses.replace(group, samples=(silent, silent)), "no token of the group was sampled"),
        (dataclasses.replace(group, baseline_reward=float("inf")), "baseline_reward is inf"),
        (dataclasses.replace(group, samples=(dataclasses.replace(first, segments=()),)), "sample 0: no segments"),
        (
            dataclasses.replace(group, samples=(dataclasses.replace(first, reward=float("nan")),)),
            "reward is nan: .* or None",
        ),
        (
            dataclasses.replace(group, samples=(dataclasses.replace(first, reward_parts={"x": float("inf")}),)),
            "reward part 'x' is inf",
        ),
        (dataclasses.replace(group, samples=(dataclasses.replace(first, extras={"x": object()}),)), "cannot be stored"),
        (dataclasses.replace(group, samples=(dataclasses.replace(first, stop_reason="abort"),)), "cannot be stored"),
        (dataclasses.replace(group, prompt_text="\ud800"), "cannot be stored"),
    ]
    for bad, message in cases:
        with pytest.raises(GroupRefused, match=message):
            encode_group(bad)


def test_vocabulary_is_a_bound_also_when_it_is_small(make_group: Callable[..., Group]) -> None:
    group = make_group(0, 0)  # tokens 5, 0, 1, 2 and 5, 7, 8, 9
    assert encode_group(group, vocabulary=10)
    with pytest.raises(GroupRefused, match=r"sample 1.*token id 9 at 3 is outside of \[0, 9\)"):
        encode_group(group, vocabulary=9)
    with pytest.raises(GroupRefused, match=r"outside of \[0, 0\)"):
        encode_group(group, vocabulary=0)


def reframed(payload: bytes) -> tuple[bytes, str]:
    return payload, digest_of(payload)


def test_altered_or_foreign_frames_are_refused(make_group: Callable[..., Group]) -> None:
    frame = encode_group(make_group(3, 3))
    raw = msgspec.msgpack.decode(frame.payload)
    encode = msgspec.msgpack.encode
    flipped = bytearray(frame.payload)
    flipped[40] ^= 1
    cases = [
        ((bytes(flipped), frame.digest), "altered or cut"),
        ((frame.payload[:-1], frame.digest), "altered or cut"),
        ((frame.payload, "é" * 64), "altered or cut"),
        (reframed(frame.payload[:-1]), "does not hold a group"),
        (reframed(frame.payload + b"\0"), "does not hold a group"),
        (reframed(b""), "does not hold a group"),
        (reframed(encode((SCHEMA + 1, raw[1]))), f"schema version {SCHEMA + 1}, this version of Miles reads {SCHEMA}"),
        (reframed(encode((SCHEMA, {**raw[1], "extra": 1}))), "not the one encoding"),
        (reframed(encode((SCHEMA, {**raw[1], "ordinal": 3.0}))), "does not hold a group|not the one encoding"),
        (reframed(encode((SCHEMA, {"ordinal": 3}))), "does not hold a group"),
        (reframed(b"\x91" * 100_000), "does not hold a group"),
        (reframed(b"\x92\x01\xdd\xff\xff\xff\xff"), "does not hold a group"),
    ]
    for (payload, digest), message in cases:
        with pytest.raises(GroupRefused, match=message):
            decode_group(payload, digest)


def test_extension_types_and_oversize_are_refused(make_group: Callable[..., Group]) -> None:
    frame = encode_group(make_group(3, 3))
    raw = msgspec.msgpack.decode(frame.payload)
    raw[1]["samples"][0]["extras"] = {"x": msgspec.msgpack.Ext(7, b"code")}
    with pytest.raises(GroupRefused, match="extension of type 7"):
        decode_group(*reframed(msgspec.msgpack.encode(raw)))
    with pytest.raises(GroupRefused, match=f"{len(frame.payload)} bytes, more than the limit of 10"):
        decode_group(frame.payload, frame.digest, max_bytes=10)


def test_ten_thousand_random_frames_are_refused_or_whole(make_group: Callable[..., Group]) -> None:
    rng = random.Random(0)
    valid = encode_group(make_group(3, 3, length=2)).payload
    whole = 0
    for trial in range(10_000):
        if trial % 2:
            payload = rng.randbytes(rng.randrange(200))
        else:
            mutable = bytearray(valid)
            for _ in range(rng.randint(1, 3)):
                mutable[rng.randrange(len(mutable))] = rng.randrange(256)
            payload = bytes(mutable[: rng.choice([len(mutable), rng.randrange(len(mutable))])])
        try:
            group = decode_group(payload, digest_of(payload))
        except GroupRefused:
            continue
        whole += 1
        assert encode_group(group).payload == payload
    assert 0 < whole < 2500  # some changed a number into another good one; none of them lost the law above
