"""The table of algorithms: each row names small pure functions and the defaults that make them that algorithm.

This package's front page is plain data and imports no torch: a collector and `miles check` read it too.
`miles.algo.build` turns the names of a row into functions; `miles.algo.rules` says which recipes a row refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal

from miles.algo.rules import correction_mode, problems, warnings
from miles.algo.userfile import load_object
from miles.errors import ConfigError

__all__ = ["DATA_ROWS", "GROUP_CREDITS", "ROWS", "AlgorithmRow", "correction_mode", "find", "problems", "warnings"]

GROUP_CREDITS = ("group_standardized", "group_centred", "leave_one_out", "group_maxrl", "group_optimal_baseline")

EVERY_ROW: Mapping[str, Any] = MappingProxyType(
    {
        "reduction": "token_mean",
        "beta": 0.0,
        "kl_place": "loss",
        "kl_estimator": "k3",
        "nll_coef": 0.0,
        "critic_warmup": 0,
    }
)
"""Defaults of the keys that every row reads; a row's own `defaults` win."""


@dataclass(frozen=True)
class AlgorithmRow:
    """One algorithm. A function is a name in the module of its kind, or a callable of the same signature.

    `defaults` are keys of the recipe's [algorithm] section, and at the same time the list of keys that the row reads:
    a recipe that sets another one is refused, because it would have no effect. `EVERY_ROW` is filled in.
    """

    name: str
    credit: str | Callable[..., Any]  # miles.algo.credit: one number a sample
    advantage: str | Callable[..., Any]  # miles.algo.advantage: one number a token
    policy_loss: str | Callable[..., Any]  # miles.algo.losses: [T] token losses of what is trained, policy or scorer
    source: str  # paper and equation
    value_loss: str | Callable[..., Any] | None = None  # miles.algo.losses; None: no critic
    defaults: Mapping[str, Any] = field(default_factory=dict)  # keys of the recipe's [algorithm] section
    group_centred: bool = False  # credit compares the samples of a group: needs >= 2 of them, equal rewards give 0
    token_rewards: bool = False  # the advantage is made of token rewards: a KL may stand in them, gamma discounts them
    one_update: bool = False  # only epochs = minibatches = 1
    bypass_only: bool = False  # correction.mode bypass and no other
    refuses_bypass: bool = False
    nonnegative_rewards: bool = False
    greedy_baseline: bool = False  # collecting adds the reward of the prompt's greedy completion to each group
    drop_equal_rewards: bool = False  # collecting drops groups whose unshaped rewards are all equal, and refills
    data: Literal["prompts", "answers", "pairs"] = (
        "prompts"  # what rows of the data hold; answers and pairs are trained as they are
    )
    scorer: bool = False  # what is trained gives one number a sequence (a reward model), not a distribution a token

    def __post_init__(self) -> None:
        object.__setattr__(self, "defaults", MappingProxyType({**EVERY_ROW, **self.defaults}))

    @property
    def min_group_size(self) -> int:
        return 2 if self.group_centred else 1

    @property
    def has_critic(self) -> bool:
        return self.value_loss is not None

    @property
    def recorded(self) -> bool:
        """Groups are made of the data as it stands: nothing is sampled and no reward is given."""
        return self.data != "prompts"

    def samples_in_group(self, group_size: int) -> int:
        """Samples of a group; group_size: the recipe's, for prompts."""
        return {"prompts": group_size, "answers": 1, "pairs": 2}[self.data]


CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
CLIP_HIGHER = {**CLIP, "clip_high": 0.28}
CLIP_SEQUENCE = {**CLIP, "clip_low": 3e-4, "clip_high": 4e-4}
KL_IN_REWARD = {"beta": 0.01, "kl_place": "reward", "kl_estimator": "k2"}

_TABLE = (
    AlgorithmRow(
        name="grpo",
        credit="group_standardized",
        advantage="broadcast",
        policy_loss="clipped",
        source="DeepSeekMath, arXiv:2402.03300, eq. 3",
        defaults={**CLIP, "scale_std": True, "reduction": "sequence_mean"},
        group_centred=True,
    ),
    AlgorithmRow(
        name="dapo",
        credit="group_standardized",
        advantage="broadcast",
        policy_loss="clipped",
        source="DAPO, arXiv:2503.14476, eq. 8",
        defaults={**CLIP_HIGHER, "scale_std": True},
        group_centred=True,
        drop_equal_rewards=True,
    ),
    AlgorithmRow(
        name="gspo",
        credit="group_standardized",
        advantage="broadcast",
        policy_loss="gspo",
        source="GSPO, arXiv:2507.18071, eq. 5-7 and the token form",
        defaults={**CLIP_SEQUENCE, "scale_std": True, "reduction": "sequence_mean"},
        group_centred=True,
        refuses_bypass=True,
    ),
    AlgorithmRow(
        name="cispo",
        credit="group_standardized",
        advantage="broadcast",
        policy_loss="cispo",
        source="MiniMax-M1, arXiv:2506.13585, eq. 4-5",
        defaults={"ratio_cap": 5.0, "scale_std": True},
        group_centred=True,
    ),
    AlgorithmRow(
        name="dppo",
        credit="group_standardized",
        advantage="broadcast",
        policy_loss="dppo",
        source="DPPO, arXiv:2602.04879, binary total variation",
        defaults={"ratio_cap": 20.0, "mask_threshold": 0.2, "scale_std": True},
        group_centred=True,
        bypass_only=True,
    ),
    AlgorithmRow(
        name="dr_grpo",
        credit="group_centred",
        advantage="broadcast",
        policy_loss="clipped",
        source="Dr. GRPO, arXiv:2503.20783, section 3",
        defaults={**CLIP, "reduction": "constant"},
        group_centred=True,
    ),
    AlgorithmRow(
        name="rloo",
        credit="leave_one_out",
        advantage="broadcast",
        policy_loss="clipped",
        source="RLOO, arXiv:2402.14740, section 3",
        defaults=CLIP,
        group_centred=True,
    ),
    AlgorithmRow(
        name="maxrl",
        credit="group_maxrl",
        advantage="broadcast",
        policy_loss="clipped",
        source="MaxRL, arXiv:2602.02710",
        defaults=CLIP,
        group_centred=True,
        nonnegative_rewards=True,
    ),
    AlgorithmRow(
        name="opo",
        credit="group_optimal_baseline",
        advantage="broadcast",
        policy_loss="reinforce",
        source="OPO, arXiv:2505.23585",
        defaults={"ratio_cap": 2.0},
        group_centred=True,
        one_update=True,
        bypass_only=True,
    ),
    AlgorithmRow(
        name="reinforce",
        credit="step_centred",
        advantage="broadcast",
        policy_loss="reinforce",
        source="REINFORCE, Williams 1992, with the step's mean as baseline",
        defaults={"ratio_cap": 2.0},
        one_update=True,
        bypass_only=True,
    ),
    AlgorithmRow(
        name="remax",
        credit="greedy_centred",
        advantage="broadcast",
        policy_loss="reinforce",
        source="ReMax, arXiv:2310.10505, algorithm 1",
        defaults={"ratio_cap": 2.0},
        one_update=True,
        bypass_only=True,
        greedy_baseline=True,
    ),
    AlgorithmRow(
        name="reinforce_pp",
        credit="reward",
        advantage="token_returns",
        policy_loss="clipped",
        source="REINFORCE++, arXiv:2501.03262",
        defaults={**CLIP, **KL_IN_REWARD, "gamma": 1.0},
        token_rewards=True,
    ),
    AlgorithmRow(
        name="reinforce_pp_baseline",
        credit="group_centred",
        advantage="broadcast_whitened",
        policy_loss="clipped",
        source="REINFORCE++ with baseline, arXiv:2501.03262",
        defaults={**CLIP, "kl_estimator": "k2"},
        group_centred=True,
    ),
    AlgorithmRow(
        name="ppo",
        credit="reward",
        advantage="gae",
        policy_loss="clipped",
        source="PPO, arXiv:1707.06347, eq. 7; GAE, arXiv:1506.02438, eq. 16",
        value_loss="clipped_value",
        defaults={**CLIP, **KL_IN_REWARD, "gamma": 1.0, "lam": 0.95, "value_clip": 0.2},
        token_rewards=True,
    ),
    AlgorithmRow(
        name="vapo",
        credit="reward",
        advantage="length_adaptive_gae",
        policy_loss="clipped",
        source="VAPO, arXiv:2504.05118, section 4",
        value_loss="clipped_value",
        defaults={
            **CLIP_HIGHER,
            **KL_IN_REWARD,
            "beta": 0.0,
            "gamma": 1.0,
            "lam": None,
            "vapo_alpha": 0.05,
            "value_clip": 0.2,
            "nll_coef": 0.1,
            "critic_warmup": 50,
        },
        token_rewards=True,
    ),
)

ROWS: Mapping[str, AlgorithmRow] = MappingProxyType({row.name: row for row in _TABLE})
"""Name -> row. Add your own from your own file instead: `algorithm.name = "path/to/file.py:NAME"`."""

_DATA_TABLE = (
    AlgorithmRow(
        name="sft",
        credit="reward",
        advantage="broadcast",
        policy_loss="likelihood",
        source="maximum likelihood of the answers, InstructGPT, arXiv:2203.02155, section 3.1",
        data="answers",
    ),
    AlgorithmRow(
        name="reward_model",
        credit="pair_side",
        advantage="broadcast",
        policy_loss="bradley_terry",
        source="InstructGPT, arXiv:2203.02155, eq. 1",
        defaults={"centre_coef": 0.0},
        data="pairs",
        scorer=True,
    ),
)

DATA_ROWS: Mapping[str, AlgorithmRow] = MappingProxyType({row.name: row for row in _DATA_TABLE})
"""Rows that learn from recorded answers, by name: what comes before reinforcement learning."""


def find(name: str) -> AlgorithmRow:
    """The row called `name`, or the `AlgorithmRow` that `path/to/file.py:NAME` holds, whose file is then executed.

    Paths are relative to the working directory. Raises ConfigError with the nearest name, or with what is wrong with
    the file.
    """
    known_rows = {**ROWS, **DATA_ROWS}
    if name in known_rows:
        return known_rows[name]
    if name.endswith(".py") or ".py:" in name:
        row = load_object(name, key="algorithm.name")
        if not isinstance(row, AlgorithmRow):
            raise ConfigError(
                f"algorithm.name: {name} is a {type(row).__name__}, not a miles.algo.AlgorithmRow: "
                "name the variable that holds the row."
            )
        return row
    spelt = name.lower().replace("++", "_pp").replace("-", "_").replace(".", "_")
    swapped = [known for known in known_rows if sorted(known) == sorted(spelt)]  # gpro is nearer to grpo than to gspo
    close = swapped or get_close_matches(spelt, known_rows, n=1, cutoff=0.5)
    hint = f'the nearest is "{close[0]}"' if close else "the rows are " + ", ".join(known_rows)
    raise ConfigError(
        f'algorithm.name: there is no algorithm "{name}"; {hint}. A row of your own is "path/to/file.py:NAME".'
    )
