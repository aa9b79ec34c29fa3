"""The table of algorithms and rows from a user's own file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles.algo import ROWS, AlgorithmRow, find
from miles.config.schema import Algorithm
from miles.errors import ConfigError

NAMES = [
    "grpo",
    "dapo",
    "gspo",
    "cispo",
    "dppo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "opo",
    "reinforce",
    "remax",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "vapo",
]


def test_the_table():
    assert list(ROWS) == NAMES
    for name in NAMES:
        assert find(name).name == name
        assert find(name).source


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"clip_low": 0.2, "clip_high": 0.2, "reduction": "sequence_mean", "beta": 0.0, "scale_std": True}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "reduction": "token_mean", "scale_std": True}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence_mean"}),
        ("cispo", {"ratio_cap": 5.0, "reduction": "token_mean"}),
        ("dppo", {"ratio_cap": 20.0, "mask_threshold": 0.2, "reduction": "token_mean"}),
        ("dr_grpo", {"clip_low": 0.2, "clip_high": 0.2, "reduction": "constant"}),
        ("rloo", {"reduction": "token_mean", "beta": 0.0}),
        ("maxrl", {"reduction": "token_mean"}),
        ("opo", {"ratio_cap": 2.0, "reduction": "token_mean"}),
        ("reinforce", {"ratio_cap": 2.0, "reduction": "token_mean"}),
        ("remax", {"ratio_cap": 2.0, "reduction": "token_mean"}),
        ("reinforce_pp", {"beta": 0.01, "kl_place": "reward", "reduction": "token_mean", "gamma": 1.0}),
        ("reinforce_pp_baseline", {"beta": 0.0, "kl_estimator": "k2", "kl_place": "loss"}),
        ("ppo", {"beta": 0.01, "kl_place": "reward", "gamma": 1.0, "lam": 0.95, "critic_warmup": 0, "clip_high": 0.2}),
        (
            "vapo",
            {"lam": None, "vapo_alpha": 0.05, "nll_coef": 0.1, "critic_warmup": 50, "clip_high": 0.28, "beta": 0.0},
        ),
    ],
)
def test_defaults(name, expected):
    defaults = ROWS[name].defaults
    assert {key: defaults[key] for key in expected} == expected
    Algorithm(name=name, **defaults)


def test_what_collecting_does_for_a_row():
    assert [name for name, row in ROWS.items() if row.drop_equal_rewards] == ["dapo"]
    assert [name for name, row in ROWS.items() if row.greedy_baseline] == ["remax"]
    assert [name for name, row in ROWS.items() if row.has_critic] == ["ppo", "vapo"]
    assert [name for name, row in ROWS.items() if row.one_update] == ["opo", "reinforce", "remax"]
    assert {name: row.min_group_size for name, row in ROWS.items() if not row.group_centred} == dict.fromkeys(
        ("reinforce", "remax", "reinforce_pp", "ppo", "vapo"), 1
    )


def test_a_row_cannot_be_changed():
    with pytest.raises(TypeError):
        ROWS["grpo"].defaults["beta"] = 1.0  # type: ignore[index]
    with pytest.raises(TypeError):
        ROWS["mine"] = ROWS["grpo"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("gpro", "grpo"),
        ("GRPO", "grpo"),
        ("reinforce++", "reinforce_pp"),
        ("dr-grpo", "dr_grpo"),
        ("Dr.GRPO", "dr_grpo"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, nearest):
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert f'there is no algorithm "{name}"; the nearest is "{nearest}"' in str(caught.value)


def test_a_far_name_gets_the_list():
    with pytest.raises(ConfigError, match=r"the rows are grpo, dapo.*vapo, sft, reward_model\. A row of your own is"):
        find("zzzzzz")


def write(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return path


def test_a_row_from_a_file(tmp_path):
    path = write(
        tmp_path,
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from miles.algo import AlgorithmRow\n"
        "@dataclass\nclass Local:\n    x: int = 1\n"
        "ROW = AlgorithmRow('mine', 'reward', 'broadcast', 'reinforce', source='me')\n",
    )
    row = find(f"{path}:ROW")
    assert (row.name, row.credit) == ("mine", "reward")
    assert row.defaults["reduction"] == "token_mean"


@pytest.mark.parametrize(
    ("text", "suffix", "words"),
    [
        ("ROW = 1", ":ROW", "is a int, not a miles.algo.AlgorithmRow"),
        ("ROWS = 1", ":ROW", "has no ROW; the nearest is ROWS"),
        ("", ":ROW", "has no ROW: name a variable"),
        ("1 / 0", ":ROW", "could not be imported: ZeroDivisionError: division by zero"),
        ("ROW = 1", "", 'names no object of the file: write "path/to/file.py:NAME"'),
        ("ROW = 1", ":not-a-name", "names no object of the file"),
    ],
)
def test_what_is_wrong_with_a_users_file_is_said(tmp_path, text, suffix, words):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        find(f"{path}{suffix}")
    assert str(caught.value).startswith("algorithm.name: ")
    assert words in str(caught.value)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.py \(looked in "):
        find(f"{tmp_path / 'nothing.py'}:ROW")


def test_the_table_and_its_rules_load_no_torch():
    code = (
        "import sys, miles.algo, miles.algo.shaping\n"
        "from miles.config.schema import Recipe\n"
        "row = miles.algo.find('vapo')\n"
        "miles.algo.problems(row, Recipe()), miles.algo.warnings(row, Recipe())\n"
        "miles.algo.find('examples/own_algorithm.py:SOFT_CLIP')\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_group_centred_rows_are_told_by_their_flag():
    row = AlgorithmRow("mine", "group_centred", "broadcast", "clipped", source="", group_centred=True)
    assert row.min_group_size == 2
    assert not row.has_critic
