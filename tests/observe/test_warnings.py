"""Each warning fires at its threshold and not before."""

from __future__ import annotations

from typing import Any

import pytest

from miles.observe.warnings import RULES, find_warnings, warnings_at_end


def run(**columns: list[Any]) -> list[dict[str, Any]]:
    """Rows from columns; `__` stands for `/`, and None for an absent key."""
    length = max(map(len, columns.values()))
    rows: list[dict[str, Any]] = [{"step": step, "version": step} for step in range(1, length + 1)]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=False):
            if value is not None:
                row[name.replace("__", "/")] = value
    return rows


def fired(rows: list[dict[str, Any]]) -> dict[str, tuple[int, int, int]]:
    return {found.rule: (found.first_step, found.last_step, found.count) for found in find_warnings(rows)}


@pytest.mark.parametrize(
    ("columns", "rule", "where"),
    [
        ({"entropy": [2.0, 0.41, 0.39]}, "entropy", (3, 3, 1)),
        ({"completion__truncated_fraction": [0.5, 0.51, 0.2, 0.9]}, "truncated", (2, 4, 2)),
        ({"completion__length_mean": [10.0, 19.9, 20.0]}, "length", (3, 3, 1)),
        ({"kl__behavior": [0.05, 0.0501]}, "kl_behavior", (2, 2, 1)),
        ({"groups__solved_all": [8, 9], "groups__generated": [10, 10]}, "solved", (2, 2, 1)),
        ({"grad_norm": [0.0] * 4 + [0.0, 1.0]}, "no_gradient", (5, 5, 1)),
        ({"grad_norm": [0.0] * 3 + [1.0, 1.0], "update__skipped": [0, 0, 0, 1, 1]}, "no_gradient", (5, 5, 1)),
        ({"update__visible_fraction": [0.16] * 5}, "visible", (5, 5, 1)),
        ({"not_finite": [None, ["loss/policy"]]}, "not_finite", (2, 2, 1)),
    ],
)
def test_a_rule_fires_past_its_threshold(columns: dict[str, list[Any]], rule: str, where: tuple[int, int, int]) -> None:
    assert fired(run(**columns)) == {rule: where}


@pytest.mark.parametrize(
    "columns",
    [
        {"entropy": [0.0, 0.0]},
        {"entropy": [None, 0.1]},
        {"entropy": [-1.0, -2.0]},
        {"completion__length_mean": [10.0, *[11.0] * 20, 21.0]},  # 10 was 21 steps ago
        {"completion__length_mean": [0.0, 5.0]},
        {"groups__solved_all": [9], "groups__generated": [None]},
        {"grad_norm": [0.0, 0.0, 1e-9, 0.0, 0.0]},
        {"grad_norm": [0.0] * 4},
        {"grad_norm": [None] * 5, "lr": [0.0] * 5},
        {"update__visible_fraction": [0.1, 0.2, None, 0.2, 0.3]},
        {"not_finite": [[]]},
        {"kl__behavior": [float("nan"), "high", True]},
    ],
)
def test_what_is_not_measured_or_within_bounds_is_no_warning(columns: dict[str, list[Any]]) -> None:
    assert fired(run(**columns)) == {}


def test_the_message_holds_the_numbers_and_the_advice_a_way_out() -> None:
    found = find_warnings(run(entropy=[2.0, 0.2]))[0]
    assert found.message == "entropy is 0.2, 10% of the first step's 2"
    assert "algorithm.entropy_coef" in found.advice
    assert found.where == "step 2"
    assert find_warnings(run(completion__truncated_fraction=[0.6, 0.7]))[0].where == "2 steps, 1 to 2"


def test_only_what_is_wrong_now_is_shown_at_the_end() -> None:
    rows = run(completion__truncated_fraction=[0.9, 0.1], kl__behavior=[0.0, 0.2])
    assert [found.rule for found in warnings_at_end(rows)] == ["kl_behavior"]
    assert warnings_at_end([]) == []


def test_evaluations_are_passed_over() -> None:
    assert find_warnings([{"event": "eval", "version": 0, "kl/behavior": 9.0}]) == []


def test_every_rule_names_what_helps() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.advice.endswith(".") for rule in RULES)
