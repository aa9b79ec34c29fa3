"""A group as bytes: MessagePack with a schema version, one encoding for one content, and nothing bad gets through.

The layout is the two-element array [schema version, group], where the group is the map of `miles.types.Group`. Bytes that
are not the one encoding of what they decode to (unknown keys, another number format) are refused, so equal groups have equal
hashes and a hash stands for a content. Nothing here unpickles.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import compress

import msgspec

from miles.errors import GroupRefused
from miles.types import Group, Sample, Segment

SCHEMA = 1
MAX_BYTES = 1 << 30
MAX_TOKEN = 1 << 31


@dataclass(frozen=True, slots=True)
class Frame:
    """A group's bytes and the SHA-256 of them, in hex."""

    payload: bytes
    digest: str


def _no_extension(code: int, data: memoryview) -> object:
    raise GroupRefused(
        f"the frame holds a MessagePack extension of type {code}: only plain values are read", "encoding"
    )


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(tuple[int, Group], ext_hook=_no_extension)
_header = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


def digest_of(payload: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(payload).hexdigest()


def encode_group(group: Group, vocabulary: int | None = None) -> Frame:
    """The one encoding of a group, checked as `decode_group` would. Tuples inside `extras` come back as lists.

    Raises GroupRefused.
    """
    try:
        plain = _decoder.decode(_encoder.encode((SCHEMA, group)))[1]
        payload = _encoder.encode((SCHEMA, plain))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise GroupRefused(f"ordinal {group.ordinal}: the group cannot be stored: {error}", "encoding") from error
    check_group(plain, vocabulary)
    _check_size(len(payload), MAX_BYTES)
    return Frame(payload, digest_of(payload))


def decode_group(payload: bytes, digest: str, vocabulary: int | None = None, max_bytes: int = MAX_BYTES) -> Group:
    """The group in `payload`; size and hash are looked at before anything is decoded. Raises GroupRefused."""
    _check_size(len(payload), max_bytes)
    actual = digest_of(payload)
    if actual != digest:
        raise GroupRefused(
            f"the bytes have the SHA-256 {actual[:16]}..., not {digest[:16]}... as said: they were altered or cut",
            "hash",
        )
    try:
        schema, _ = _header.decode(payload)
        if schema != SCHEMA:
            raise GroupRefused(f"the frame has schema version {schema}, this version of Miles reads {SCHEMA}", "schema")
        group = _decoder.decode(payload)[1]
        canonical = _encoder.encode((SCHEMA, group)) == payload
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise GroupRefused(f"the frame does not hold a group: {error}", "encoding") from error
    if not canonical:
        raise GroupRefused(
            "the frame is not the one encoding of its group (unknown keys, or another number format)", "encoding"
        )
    check_group(group, vocabulary)
    return group


def check_group(group: Group, vocabulary: int | None = None) -> None:
    """Raises GroupRefused where lengths differ, a number is not finite, or a token id is outside of the vocabulary."""
    where = f"ordinal {group.ordinal}"
    if group.ordinal < 0 or group.row < 0:
        raise GroupRefused(f"{where}: ordinal and row must not be negative, row is {group.row}")
    if not group.samples:
        raise GroupRefused(f"{where}: the group has no samples")
    for index, sample in enumerate(group.samples):
        _check_sample(sample, f"{where}, sample {index}", MAX_TOKEN if vocabulary is None else vocabulary)
    if not any(sample.num_trained for sample in group.samples):
        raise GroupRefused(f"{where}: no token of the group was sampled, so there is nothing to train")
    _check_number(group.baseline_reward, f"{where}: baseline_reward")


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise GroupRefused(f"the frame has {size} bytes, more than the limit of {limit}", "size")


def _check_sample(sample: Sample, where: str, vocabulary: int) -> None:
    if not sample.segments:
        raise GroupRefused(f"{where}: no segments")
    for index, segment in enumerate(sample.segments):
        _check_segment(segment, f"{where}, segment {index}", vocabulary)
    _check_number(sample.reward, f"{where}: reward")
    for name, value in sample.reward_parts.items():
        _check_number(value, f"{where}: reward part {name!r}")


def _check_number(value: float | None, name: str) -> None:
    if value is not None and not math.isfinite(value):
        raise GroupRefused(f"{name} is {value}: it must be finite, or None where it cannot be scored", "non_finite")


def _check_segment(segment: Segment, where: str, vocabulary: int) -> None:
    length = len(segment.token_ids)
    lengths = (len(segment.loss_mask), len(segment.behavior_logprobs), len(segment.versions))
    if length == 0 or lengths != (length, length, length):
        raise GroupRefused(
            f"{where}: {length} token_ids but {lengths[0]} loss_mask, {lengths[1]} behavior_logprobs and {lengths[2]} "
            "versions: all four must have one length, at least 1",
            "lengths",
        )
    if min(segment.token_ids) < 0 or max(segment.token_ids) >= vocabulary:
        place = next(i for i, token in enumerate(segment.token_ids) if not 0 <= token < vocabulary)
        raise GroupRefused(
            f"{where}: token id {segment.token_ids[place]} at {place} is outside of [0, {vocabulary})", "vocabulary"
        )
    if not all(map(math.isfinite, segment.behavior_logprobs)):
        place = next(i for i, value in enumerate(segment.behavior_logprobs) if not math.isfinite(value))
        raise GroupRefused(
            f"{where}: behavior_logprobs[{place}] is {segment.behavior_logprobs[place]}: it must be finite",
            "non_finite",
        )
    _check_unsampled(segment, where)


def _check_unsampled(segment: Segment, where: str) -> None:
    """Versions and log-probabilities say the same as the loss mask about which tokens were sampled."""
    unsampled = [not sampled for sampled in segment.loss_mask]
    if any(version < 0 for version in set(compress(segment.versions, segment.loss_mask))):
        pairs = zip(segment.loss_mask, segment.versions, strict=True)
        place = next(i for i, (sampled, version) in enumerate(pairs) if sampled and version < 0)
        raise GroupRefused(f"{where}: token {place} was sampled, but its version is {segment.versions[place]}", "mask")
    if set(compress(segment.versions, unsampled)) <= {-1} and not any(compress(segment.behavior_logprobs, unsampled)):
        return
    triples = zip(unsampled, segment.versions, segment.behavior_logprobs, strict=True)
    place = next(i for i, (free, version, logprob) in enumerate(triples) if free and (version != -1 or logprob != 0.0))
    raise GroupRefused(
        f"{where}: token {place} was not sampled, so its version must be -1 and its log-probability 0.0; they are "
        f"{segment.versions[place]} and {segment.behavior_logprobs[place]}",
        "mask",
    )
