"""Signs of a run that goes wrong, read from its metrics rows: what was seen, since when, and what helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles.observe.rows import Row, step_rows, value_of
from miles.observe.text import number

ENTROPY_LEFT = 0.2
TRUNCATED = 0.5
LENGTH_GROWTH = 2.0
LENGTH_WINDOW = 20
KL_BEHAVIOR = 0.05
SOLVED = 0.8
NO_GRADIENT_STEPS = 5
VISIBLE = 0.5
VISIBLE_STEPS = 5


@dataclass(frozen=True)
class Finding:
    """One rule that fired: over `count` steps, the first and the last of which are named; `message` is the last one's."""

    rule: str
    message: str
    advice: str
    first_step: int
    last_step: int
    count: int

    @property
    def where(self) -> str:
        if self.count == 1:
            return f"step {self.last_step}"
        return f"{self.count} steps, {self.first_step} to {self.last_step}"


@dataclass(frozen=True)
class Rule:
    """`seen(rows, i)` says what is wrong at row i, given the step rows before it, or None."""

    name: str
    seen: Callable[[Sequence[Row], int], str | None]
    advice: str


def find_warnings(rows: Sequence[Row]) -> list[Finding]:
    """Every rule that fired at any step, in the order of RULES. Evaluation rows are passed over."""
    steps = step_rows(rows)
    found = []
    for rule in RULES:
        hits = [(i, message) for i in range(len(steps)) if (message := rule.seen(steps, i)) is not None]
        if hits:
            first, last = (int(value_of(steps[i], "step") or 0) for i in (hits[0][0], hits[-1][0]))
            found.append(Finding(rule.name, hits[-1][1], rule.advice, first, last, len(hits)))
    return found


def warnings_at_end(rows: Sequence[Row]) -> list[Finding]:
    """The rules that fire at the last step: what is wrong now. `rows` are step rows."""
    if not rows:
        return []
    step = int(value_of(rows[-1], "step") or 0)
    seen = [(rule, rule.seen(rows, len(rows) - 1)) for rule in RULES]
    return [Finding(rule.name, message, rule.advice, step, step, 1) for rule, message in seen if message is not None]


def _entropy(rows: Sequence[Row], i: int) -> str | None:
    first, now = value_of(rows[0], "entropy"), value_of(rows[i], "entropy")
    if first is None or now is None or first <= 0 or now >= ENTROPY_LEFT * first:
        return None
    return f"entropy is {number(now)}, {now / first:.0%} of the first step's {number(first)}"


def _truncated(rows: Sequence[Row], i: int) -> str | None:
    share = value_of(rows[i], "completion/truncated_fraction")
    if share is None or share <= TRUNCATED:
        return None
    return f"{share:.0%} of the completions are cut by the token limit"


def _length(rows: Sequence[Row], i: int) -> str | None:
    now = value_of(rows[i], "completion/length_mean")
    step = value_of(rows[i], "step")
    if now is None or step is None:
        return None
    window = [
        row for row in rows[max(0, i - LENGTH_WINDOW) : i] if (value_of(row, "step") or 0) >= step - LENGTH_WINDOW
    ]
    lengths = [length for row in window if (length := value_of(row, "completion/length_mean"))]
    if not lengths or now < LENGTH_GROWTH * min(lengths):
        return None
    return f"completions grew from {number(min(lengths))} to {number(now)} tokens within {LENGTH_WINDOW} steps"


def _kl_behavior(rows: Sequence[Row], i: int) -> str | None:
    kl = value_of(rows[i], "kl/behavior")
    if kl is None or kl <= KL_BEHAVIOR:
        return None
    return f"kl/behavior is {number(kl)}, above {KL_BEHAVIOR}: what sampled and what is trained differ"


def _solved(rows: Sequence[Row], i: int) -> str | None:
    solved, groups = value_of(rows[i], "groups/solved_all"), value_of(rows[i], "groups/generated")
    if solved is None or not groups or solved / groups <= SOLVED:
        return None
    return f"{solved / groups:.0%} of the groups are solved by every sample: little is left to learn from"


def _no_gradient(rows: Sequence[Row], i: int) -> str | None:
    last = rows[max(0, i - NO_GRADIENT_STEPS + 1) : i + 1]
    if len(last) < NO_GRADIENT_STEPS or not all(_still(row) for row in last):
        return None
    return f"no gradient for {NO_GRADIENT_STEPS} steps: the weights stand still"


def _still(row: Row) -> bool:
    return value_of(row, "grad_norm") == 0 or (value_of(row, "update/skipped") or 0) > 0


def _visible(rows: Sequence[Row], i: int) -> str | None:
    shares = [value_of(row, "update/visible_fraction") for row in rows[max(0, i - VISIBLE_STEPS + 1) : i + 1]]
    low = [share for share in shares if share is not None and share < VISIBLE]
    if len(low) < VISIBLE_STEPS:
        return None
    return f"only {low[-1]:.0%} of the weights' movement survives rounding to the compute type"


def _not_finite(rows: Sequence[Row], i: int) -> str | None:
    names = rows[i].get("not_finite")
    if not isinstance(names, list) or not names:
        return None
    return f"NaN or infinite, so left out of the row: {', '.join(map(str, names))}"


RULES = (
    Rule(
        "entropy",
        _entropy,
        "The policy collapses onto few answers. Lower learner.learning_rate, raise algorithm.clip_high or set "
        "algorithm.entropy_coef; a task that is simply solved may end here too.",
    ),
    Rule(
        "truncated",
        _truncated,
        "Raise rollout.max_new_tokens, or say with reward.truncated what a cut answer is worth.",
    ),
    Rule(
        "length",
        _length,
        "Read some samples: is the reward paying for length? reward.overlong and algorithm.reduction act on it.",
    ),
    Rule(
        "kl_behavior",
        _kl_behavior,
        "Compare engine and learner with `miles doctor`, lower buffer.max_staleness, or set algorithm.correction.",
    ),
    Rule("solved", _solved, "Harder prompts, or stop here: run.stop_at_reward ends a run by its evaluations."),
    Rule(
        "no_gradient",
        _no_gradient,
        "Equal rewards within each group give no gradient: look at groups/solved_all and groups/solved_none. Skipped "
        "updates are shown by update/skipped.",
    ),
    Rule(
        "visible",
        _visible,
        'bf16 hides small steps. Use learner.param_dtype = "fp32", or a learning rate about three times as high.',
    ),
    Rule(
        "not_finite",
        _not_finite,
        "A number overflowed or was divided by zero: look at grad_norm and ratio/max around it.",
    ),
)
