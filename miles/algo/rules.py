"""Which recipes an algorithm's row refuses, and which it only warns about; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.algo.binding import ARGUMENTS, own_problems

if TYPE_CHECKING:
    from miles.algo import AlgorithmRow
    from miles.config.schema import Recipe

ROW_KEYS = (
    "scale_std",
    "clip_low",
    "clip_high",
    "dual_clip",
    "ratio_cap",
    "mask_threshold",
    "gamma",
    "lam",
    "vapo_alpha",
    "value_clip",
    "centre_coef",
)
"""Keys of [algorithm] that only some rows read."""

GEOMETRIC_MIN_TOKENS = 256
"""Shorter answers are not masked by the geometric mean: theirs is too noisy."""

VISIBLE_LEARNING_RATE = 3e-5
"""Below it bf16 weights hide most of an update (docs/precision.md)."""


def settings_of(row: AlgorithmRow, recipe: Recipe) -> dict[str, Any]:
    """The [algorithm] section by key, with the row's defaults where the recipe says nothing; absent: nobody says anything."""
    section, out = recipe.algorithm, dict(row.defaults)
    for name, declared in type(section).model_fields.items():
        value = getattr(section, name)
        # A key whose default is None leaves it to the row; elsewhere None is a choice (value_clip).
        given = value is not None if declared.default is None else name in section.model_fields_set
        if given or (name not in out and value is not None):
            out[name] = value
    return out


def updates_per_step(recipe: Recipe) -> int:
    return recipe.learner.epochs * recipe.learner.minibatches


def correction_mode(row: AlgorithmRow, recipe: Recipe) -> str:
    """`none`, `bypass` or `decoupled`: what `algorithm.correction.mode = "auto"` stands for in this recipe.

    none: old is the update's own forward, which is also the behavior policy. bypass: old := behavior. decoupled: old is
    the policy at the start of the step, and old/behavior a weight of its own (arXiv:2110.00641).
    """
    mode = recipe.algorithm.correction.mode
    if row.recorded:
        return "none"
    if mode != "auto":
        return mode
    if row.bypass_only:
        return "bypass"
    return "none" if _behavior_is_old(recipe) and updates_per_step(recipe) == 1 else "decoupled"


def problems(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    """One sentence for each thing in the recipe that the row cannot work with: key, value, way out."""
    functions = {kind: getattr(row, kind) for kind in ARGUMENTS}
    own = own_problems(functions, settings_of(row, recipe), row.name)
    if row.recorded:
        return [*own, *_recorded(row, recipe), *_launched(row, recipe), *_without_effect(row, recipe)]
    found = [
        *own,
        *_group_size(row, recipe),
        *_updates(row, recipe),
        *_mode(row, recipe),
        *_correction(row, recipe),
        *_kl(row, recipe),
        *_without_effect(row, recipe),
        *_rewards(row, recipe),
    ]
    return found


def warnings(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    """One sentence for each thing in the recipe that works, but probably not as meant."""
    algorithm, learner, found = recipe.algorithm, recipe.learner, []
    if not row.recorded and recipe.data.max_row_tokens is not None:
        found.append(
            f"data.max_row_tokens = {recipe.data.max_row_tokens} has no effect with {row.name}, which samples its answers."
        )
    setting = settings_of(row, recipe)
    tokens = recipe.rollout.max_new_tokens
    if "vapo_alpha" in row.defaults and algorithm.lam is None and algorithm.vapo_alpha * tokens < 2:
        found.append(
            f"algorithm.vapo_alpha = {algorithm.vapo_alpha:g} with rollout.max_new_tokens = {tokens} makes lambda less than "
            "0.5 for every answer, so the reward reaches few of its tokens: use vapo_alpha = 1 for short answers."
        )
    if learner.param_dtype == "bf16" and recipe.lora.rank is None and 0 < learner.learning_rate < VISIBLE_LEARNING_RATE:
        found.append(
            f"learner.param_dtype = bf16 at learner.learning_rate = {learner.learning_rate:g}: bf16 rounding hides most of "
            f"each update below {VISIBLE_LEARNING_RATE:g}; watch update/visible_fraction, or use fp32 (docs/precision.md)."
        )
    if setting["beta"] and setting["kl_place"] == "loss" and setting["kl_estimator"] == "k1":
        found.append(
            'algorithm.kl_estimator = "k1" in the loss has zero expected gradient and holds nothing back: use k2 or '
            "k3_weighted, or put the KL into the reward."
        )
    if row.policy_loss == "gspo" and setting["reduction"] != "sequence_mean":
        found.append(
            f'algorithm.reduction = "{setting["reduction"]}" lets long answers dominate the sequence ratio of {row.name}: '
            "its paper uses sequence_mean."
        )
    return found


def _launched(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    launcher = recipe.run.launcher
    if launcher == "local":
        return []
    return [
        f'run.launcher = "{launcher}" starts collectors, and {row.name} learns from recorded answers, so that there is nothing to '
        'collect: leave run.launcher at "local".'
    ]


def _recorded(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    """What only sampled answers have."""
    algorithm, default = recipe.algorithm, type(recipe.algorithm)()
    keys = (
        "beta",
        "kl_place",
        "kl_estimator",
        "kl_target",
        "ref_update_every",
        "entropy_coef",
        "nll_coef",
        "correction",
    )
    idle = [
        (f"algorithm.{key}", value)
        for key in keys
        if (value := getattr(algorithm, key)) not in (getattr(default, key), row.defaults.get(key))
    ]
    idle += [
        (key, value)
        for key, value, usual in (
            ("reward.model", recipe.reward.model, None),
            ("reward.functions", recipe.reward.functions, ()),
            ("rollout.environment", recipe.rollout.environment, None),
            ("rollout.temperature", recipe.rollout.temperature, 1.0),
            ("engine.kind", recipe.engine.kind, "inprocess"),
            ("buffer.max_staleness", recipe.buffer.max_staleness, 0),
            ("run.stop_at_reward", recipe.run.stop_at_reward, None),
        )
        if value != usual
    ]
    found = [
        f"{key} = {value} has no meaning with {row.name}, which learns from recorded answers: nothing is sampled, scored or "
        "compared with a reference; leave it out."
        for key, value in idle
    ]
    if algorithm.reduction == "constant":
        found.append(
            f'algorithm.reduction = "constant" does not fit {row.name}: it divides by rollout.max_new_tokens, which says nothing '
            "of recorded answers; use token_mean or sequence_mean."
        )
    return found


def _behavior_is_old(recipe: Recipe) -> bool:
    return recipe.engine.kind == "inprocess" and recipe.buffer.max_staleness == 0


def _group_size(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    size = recipe.rollout.group_size
    if size >= row.min_group_size:
        return []
    return [
        f"rollout.group_size must be >= {row.min_group_size} for {row.name}, got {size}: it compares the answers to one "
        "prompt and learns nothing from one; raise rollout.group_size, or choose algorithm.name = reinforce or ppo."
    ]


def _updates(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    if not row.one_update:
        return []
    return [
        f"learner.{key} must be 1 for {row.name}, got {value}: its loss has no clip that would hold a second update back; "
        f"set it to 1, or choose a clipped algorithm such as grpo or rloo."
        for key, value in (("epochs", recipe.learner.epochs), ("minibatches", recipe.learner.minibatches))
        if value > 1
    ]


def _mode(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    mode = recipe.algorithm.correction.mode
    key = f'algorithm.correction.mode = "{mode}"'
    if row.bypass_only and mode in ("none", "decoupled"):
        return [f"{key} does not fit {row.name}, whose ratio is to the behavior policy: use auto or bypass."]
    if row.refuses_bypass and mode == "bypass":
        return [
            f"{key} does not fit {row.name}: its clip range is smaller than the rounding noise between engine and learner; "
            "use auto or decoupled."
        ]
    if mode != "none":
        return []
    why = []
    if recipe.buffer.max_staleness >= 1:
        why.append(f"buffer.max_staleness = {recipe.buffer.max_staleness}")
    if updates_per_step(recipe) > 1:
        why.append(f"learner.epochs * learner.minibatches = {updates_per_step(recipe)}")
    if recipe.engine.kind != "inprocess":
        why.append(f"engine.kind = {recipe.engine.kind}")
    if not why:
        return []
    return [
        f"{key} is refused with {' and '.join(why)}: the policy that trains is not the one that sampled, and nothing would "
        "correct for it; use auto, decoupled or bypass."
    ]


def _correction(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    correction, mode = recipe.algorithm.correction, correction_mode(row, recipe)
    default = type(correction)()
    if mode != "decoupled":
        return [
            f"algorithm.correction.{key} = {getattr(correction, key)} has no effect: the mode is {mode} here"
            f"{' (auto)' if correction.mode == 'auto' else ''}; set algorithm.correction.mode = decoupled, or leave it out."
            for key in ("kind", "cap", "low", "high")
            if getattr(correction, key) != getattr(default, key)
        ]
    if correction.kind in ("truncate", "sequence_truncate"):
        return [
            f'algorithm.correction.{key} = {getattr(correction, key):g} has no effect with kind = "{correction.kind}", which '
            "only has a cap: choose a mask, or leave it out."
            for key in ("low", "high")
            if getattr(correction, key) is not None
        ]
    found = []
    if correction.cap != default.cap:
        found.append(
            f'algorithm.correction.cap = {correction.cap:g} has no effect with kind = "{correction.kind}", which has low and '
            "high: choose a truncation, or leave it out."
        )
    low, high = mask_bounds(correction.kind, correction.low, correction.high)
    if low >= high:
        found.append(
            f"algorithm.correction.low = {low:g} must be below high = {high:g}: otherwise every token is masked; swap or "
            "widen them."
        )
    if correction.kind == "sequence_mask_geometric" and recipe.rollout.max_new_tokens < GEOMETRIC_MIN_TOKENS:
        found.append(
            f'algorithm.correction.kind = "sequence_mask_geometric" judges answers of >= {GEOMETRIC_MIN_TOKENS} tokens, and '
            f"rollout.max_new_tokens = {recipe.rollout.max_new_tokens} allows none: use truncate or mask."
        )
    return found


def mask_bounds(kind: str, low: float | None, high: float | None) -> tuple[float, float]:
    """[low, high] of a masking correction, with the defaults of its kind."""
    default_low, default_high = {
        "mask": (0.5, 5.0),
        "sequence_mask_geometric": (0.99, 1.01),
        "sequence_mask_product": (0.5, 2.0),
    }[kind]
    return default_low if low is None else low, default_high if high is None else high


def _kl(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    algorithm, setting, found = recipe.algorithm, settings_of(row, recipe), []
    if setting["kl_place"] == "reward" and not row.token_rewards:
        found.append(
            f'algorithm.kl_place = "reward" does not fit {row.name}, which has one number a sample and no token rewards: use '
            'kl_place = "loss", or choose ppo or reinforce_pp.'
        )
    elif setting["kl_place"] == "reward" and algorithm.kl_estimator not in (None, "k1", row.defaults["kl_estimator"]):
        found.append(
            f'algorithm.kl_estimator = "{algorithm.kl_estimator}" has no effect: in the reward the KL is always k1; set '
            'kl_place = "loss", or leave it out.'
        )
    for key, value in (("kl_target", algorithm.kl_target), ("ref_update_every", algorithm.ref_update_every)):
        if value is not None and setting["beta"] == 0:
            found.append(
                f"algorithm.{key} = {value:g} has no effect with beta = 0, where no reference is used: set algorithm.beta "
                "above 0, or leave it out."
            )
    return found


def _without_effect(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    algorithm, found = recipe.algorithm, []
    for key in ROW_KEYS:
        value = getattr(algorithm, key)
        if key in row.defaults or value == type(algorithm).model_fields[key].default:
            continue
        found.append(
            f"algorithm.{key} = {value} has no effect with {row.name}, which does not read it: leave it out, or choose a "
            "row that does (docs/algorithms.md)."
        )
    if algorithm.value_ref and not row.has_critic:
        found.append(
            f"algorithm.value_ref = {algorithm.value_ref:g} has no effect with {row.name}, which has no critic: leave it out, or "
            "choose ppo or vapo."
        )
    if recipe.learner.critic_model is not None and not row.has_critic:
        found.append(
            f"learner.critic_model = {recipe.learner.critic_model} has no effect with {row.name}, which has no critic: leave it out, "
            "or choose ppo or vapo."
        )
    if algorithm.critic_warmup and not row.has_critic:
        found.append(
            f"algorithm.critic_warmup = {algorithm.critic_warmup} has no effect with {row.name}, which has no critic: leave "
            "it out, or choose ppo or vapo."
        )
    return found


def _rewards(row: AlgorithmRow, recipe: Recipe) -> list[str]:
    reward, tokens, found = recipe.reward, recipe.rollout.max_new_tokens, []
    if reward.model is not None and reward.model_place == "learner" and (row.drop_equal_rewards or row.greedy_baseline):
        needs = (
            "drops groups by their rewards" if row.drop_equal_rewards else "scores a greedy answer beside each group"
        )
        found.append(
            f'reward.model_place = "learner" does not fit {row.name}, which {needs} while collecting, before the learner has '
            'scored them: leave it at "collecting", or choose grpo or ppo.'
        )
    if reward.overlong and reward.overlong_buffer is not None and not 0 < reward.overlong_buffer <= tokens:
        found.append(
            f"reward.overlong_buffer = {reward.overlong_buffer} must lie in 1..{tokens} (rollout.max_new_tokens): it is the "
            "stretch over which the penalty grows; change it, or leave it out for a quarter of the limit."
        )
    if row.nonnegative_rewards and reward.overlong:
        found.append(
            f"reward.overlong = true does not fit {row.name}, which divides by the group's mean reward and refuses negative "
            "ones: switch it off, or choose grpo."
        )
    if row.nonnegative_rewards and reward.truncated == "value" and reward.truncated_value < 0:
        found.append(
            f"reward.truncated_value = {reward.truncated_value:g} does not fit {row.name}, which refuses negative rewards: "
            "set it to 0 or more, or choose grpo."
        )
    return found
