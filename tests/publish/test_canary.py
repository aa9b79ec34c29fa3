"""When log-probabilities of a server and of the learner are said to be the same."""

from __future__ import annotations

import math

import pytest

from miles.errors import ServerFault
from miles.publish.canary import Difference, Tolerance, compare

FP32, BF16 = Tolerance.of("fp32"), Tolerance.of("bf16")
ZEROS = [0.0] * 200


def off(*gaps: float) -> list[float]:
    return [*gaps, *ZEROS[len(gaps) :]]


def test_differences_are_counted_without_signs() -> None:
    found = Difference.between(off(0.4, -0.2, 0.1), ZEROS)
    assert found.mean == pytest.approx(0.7 / 200)
    assert (found.high, found.worst) == (0.1, 0.4)  # 198 of 200 tokens are at 0.1 or below


def test_fp32_is_judged_by_its_worst_token() -> None:
    assert compare(off(9e-4), ZEROS, FP32) == 9e-4
    with pytest.raises(
        ServerFault, match=r"by 5.5e-06 nat on average and 0.0011 at worst \(0.001 and 0.001 are rounding\)"
    ):
        compare(off(1.1e-3), ZEROS, FP32)


def test_bf16_is_judged_by_its_mean_and_its_99th_percentile() -> None:
    assert compare(off(0.4, 0.4), ZEROS, BF16) == 0.4
    with pytest.raises(ServerFault, match="differ"):
        compare(off(0.3, 0.3, 0.3), ZEROS, BF16)
    with pytest.raises(ServerFault, match="differ"):
        compare([0.07] * 200, ZEROS, BF16)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_the_same(value: float) -> None:
    with pytest.raises(ServerFault, match="not finite"):
        compare(off(value), ZEROS, BF16)
    with pytest.raises(ServerFault, match="not finite"):
        compare(ZEROS, off(value), FP32)


def test_an_answer_of_another_length_is_refused() -> None:
    with pytest.raises(ServerFault, match="gave 199 log-probabilities of a canary that has 200"):
        compare(ZEROS[1:], ZEROS, FP32)
