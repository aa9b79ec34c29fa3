"""Which charts the report has, and which metric keys each of them shows."""

from __future__ import annotations

from collections.abc import Sequence

from miles.observe.charts import CALM_FROM, Chart, Series
from miles.observe.metrics import CORRECT_REWARD
from miles.observe.rows import Row, is_recorded, series
from miles.observe.rundir import RunData
from miles.observe.warnings import KL_BEHAVIOR, TRUNCATED

AGES = "staleness/groups/"
STAGES = ("collect", "score", "update", "publish")


def reward_chart(data: RunData) -> Chart:
    """Training reward by step, and the held-out evaluations on it."""
    raw = series(data.steps, "reward/mean")
    lines = [Series("training", raw, 1, marker="" if len(raw) > CALM_FROM else "round")]
    trained = series(data.steps, "reward/trained_mean")
    if any(groups != all_groups for groups, all_groups in zip(trained, raw, strict=False)):
        lines.append(Series("groups that were trained", trained, 0, dashed=True))
    errors = dict(series(data.evals, "eval/standard_error", "version"))
    sampled = series(data.evals, "eval/reward/mean", "version")
    greedy = series(data.evals, "eval/reward/greedy", "version")
    bars = [errors.get(version, 0.0) for version, _ in sampled]
    lines.append(Series("held-out, sampled", sampled, 2, "round", errors=bars, light=True))
    lines.append(Series("held-out, greedy", greedy, 3, "square", dashed=True, light=True))
    values = [y for line in lines for _, y in line.points]
    unit_scale = bool(values) and min(values) >= 0 and max(values) <= 1
    return Chart(
        "Reward",
        "mean reward of a sample",
        lines,
        "Every finished group counts, dropped ones too. Bars are one standard error of an evaluation.",
        large=True,
        low=0.0 if unit_scale else None,
        high=1.0 if unit_scale else None,
    )


def held_out_charts(data: RunData) -> list[Chart]:
    """What recorded answers are judged by: the loss, and how many pairs a reward model orders as people did."""

    def lines(training: str, held_out: str) -> list[Series]:
        points = series(data.evals, held_out, "version")
        return [Series("training", series(data.steps, training), 1), Series("held-out", points, 2, "round", light=True)]

    if not any(is_recorded(row) for row in data.steps):
        return []
    return [
        Chart("Loss", "loss", lines("loss/total", "eval/loss"), "Held-out far above training: the rows are learnt by heart.",
              large=True),
        Chart("Pairs in the right order", "share of pairs", lines("pairs/accuracy", "eval/pairs/accuracy"),
              "One half is guessing.", low=0.0, high=1.0),
    ]  # fmt: skip


def part_chart(data: RunData) -> Chart:
    """One curve for each part of the reward, where there are several."""
    keys = sorted(
        {
            key
            for row in data.steps
            for key in row
            if key.startswith("reward/") and key.endswith("/mean") and key.count("/") >= 2
        }
    )
    parts = [
        Series(key.removeprefix("reward/").removesuffix("/mean"), series(data.steps, key), 1 + i % 7)
        for i, key in enumerate(keys)
    ]
    return Chart("Reward parts", "mean of a part, before its weight", parts if len(parts) > 1 else [])


def learning_charts(steps: Sequence[Row]) -> list[Chart]:
    def lines(*named: tuple[str, str]) -> list[Series]:
        return [Series(label, series(steps, key), tone) for tone, (key, label) in enumerate(named, start=1)]

    return [
        Chart("Policy loss", "loss", lines(("loss/policy", "policy"), ("loss/total", "total")),
              "Its level says little; jumps do."),
        Chart("Entropy", "nats per token", lines(("entropy", "mean"), ("entropy/p10", "lowest tenth")),
              "A slow fall is learning; a fall to nothing is collapse.", low=0.0),
        Chart("KL to the reference", "nats per token", lines(("kl/ref", "kl/ref")), "How far the policy has moved."),
        Chart("Engine against learner", "KL, nats per token", lines(("kl/behavior", "kl/behavior")),
              "What sampled against what is trained; near 0 when both agree.",
              limits=[(KL_BEHAVIOR, "warning above this")]),
        Chart("Within the step", "KL, nats per token", lines(("kl/old", "kl/old")), "The policy now against the step's start."),
        Chart("Ratio", "new / old probability", lines(("ratio/mean", "mean"), ("ratio/max", "largest"))),
        Chart("Clipped tokens", "share of tokens", lines(("ratio/clip_fraction", "clipped"),
              ("correction/masked_fraction", "masked by correction")), low=0.0),
        Chart("Correction weight", "old / behavior probability", lines(("correction/weight_max", "largest"))),
        Chart("Effective samples", "share", lines(("correction/ess", "effective sample size")), high=1.0),
        Chart("Gradient norm", "before clipping", lines(("grad_norm", "actor"), ("grad_norm/critic", "critic")), low=0.0),
        Chart("Learning rate", "learning rate", lines(("lr", "actor"), ("lr/critic", "critic")), low=0.0),
        Chart("Advantage", "advantage", lines(("advantage/std", "standard deviation"), ("advantage/mean", "mean"))),
        Chart("Value loss", "loss", lines(("loss/value", "critic")), low=0.0),
        Chart("Explained variance", "share of the returns' variance", lines(("value/explained_variance", "critic")),
              "1 is a perfect critic, 0 is one that says the mean.", high=1.0),
        Chart("Visible update", "share of the movement", lines(("update/visible_fraction", "visible")),
              "What rounding to the compute type leaves of the weights' movement.", low=0.0, high=1.0),
    ]  # fmt: skip


def completion_charts(steps: Sequence[Row]) -> list[Chart]:
    def line(key: str, label: str, tone: int = 1) -> Series:
        return Series(label, series(steps, key), tone)

    return [
        Chart("Completion length", "sampled tokens", [
            line("completion/length_mean", "mean"), line("completion/length_correct_mean", "correct", 3),
            line("completion/length_wrong_mean", "wrong", 2)],
            f"Correct: a reward of at least {CORRECT_REWARD:g}.", low=0.0),
        Chart("Longest completion", "sampled tokens", [line("completion/length_max", "longest")], low=0.0),
        Chart("Cut by the token limit", "share of samples", [line("completion/truncated_fraction", "cut")],
              low=0.0, limits=[(TRUNCATED, "warning above this")]),
        Chart("Repetition", "share of repeated 4-grams", [line("completion/repeat_fraction", "repeated")], low=0.0),
        Chart("Distinct answers", "share of a group's samples", [line("group/unique_fraction", "distinct")],
              "How different the answers to one prompt are.", low=0.0, high=1.0),
    ]  # fmt: skip


def group_charts(data: RunData) -> list[Chart]:
    """What became of each step's groups, how many taught nothing, and how old the weights behind them were."""
    reasons = sorted({key for row in data.steps for key in row if key.startswith("groups/dropped/")})
    dropped = [
        Series(f"dropped: {key.removeprefix('groups/dropped/')}", series(data.steps, key), (2, 5, 6, 4, 7)[i % 5])
        for i, key in enumerate(reasons)
    ]
    equal = [
        Series("solved by every sample", series(data.steps, "groups/solved_all"), 3),
        Series("solved by none", series(data.steps, "groups/solved_none"), 2),
    ]
    staleness = [
        Series("largest", series(data.steps, "staleness/max"), 2),
        Series("mean", series(data.steps, "staleness/mean"), 1),
    ]
    ages = sorted({key for row in data.steps for key in row if key.startswith(AGES)}, key=_age)
    histogram = [(float(_age(key)), sum(value for _, value in series(data.steps, key))) for key in ages]
    return [
        Chart("Finished groups", "groups", [Series("trained", series(data.steps, "groups/trained"), 1), *dropped],
              "Where the step's prompts went.", stacked=True),
        Chart("Groups with equal rewards", "groups", equal, "They teach a group-centred algorithm nothing.", stacked=True),
        Chart("Staleness", "versions", staleness, "Updates between sampling a group and training on it.", low=0.0),
        Chart("Staleness of all trained groups", "groups", [Series("groups", histogram)], x_label="staleness", stacked=True),
        Chart("Ready when asked for", "share of the step's groups", [Series("ready", series(data.steps, "time/ready_fraction"))],
              "1: the learner never waited for a group; 0: it waited for each.", low=0.0, high=1.0),
    ]  # fmt: skip


def _age(key: str) -> int:
    age = key.removeprefix(AGES)
    return int(age) if age.isascii() and age.isdigit() else 0


def time_chart(data: RunData) -> Chart:
    """Where each step's wall-clock time went; `other` is what no stage accounts for."""
    stages = [Series(stage, series(data.steps, f"time/{stage}_s"), i) for i, stage in enumerate(STAGES, start=1)]
    other = []
    for row, total in ((row, dict(series([row], "time/step_s"))) for row in data.steps):
        for step, seconds in total.items():
            known = sum(value for stage in STAGES for _, value in series([row], f"time/{stage}_s"))
            other.append((step, max(seconds - known, 0.0)))
    return Chart(
        "Time of a step",
        "seconds",
        [*stages, Series("other", other, 0)],
        "Collect: sampling and rewards. Score: forwards before the update. Publish: new weights to the engines.",
        stacked=True,
        large=True,
    )


def resource_charts(steps: Sequence[Row]) -> list[Chart]:
    memory = [(step, value / 2**30) for step, value in series(steps, "memory/peak_bytes")]
    tokens = [
        Series(label, series(steps, f"tokens/{label}"), tone)
        for tone, label in enumerate(("generated", "trained", "scored"), start=1)
    ]
    return [
        Chart("Samples", "samples per second", [Series("samples", series(steps, "throughput/samples_per_s"))], low=0.0),
        Chart("Tokens", "tokens per second", [Series("tokens", series(steps, "throughput/tokens_per_s"))], low=0.0),
        Chart("Tokens of a step", "tokens", tokens, low=0.0),
        Chart("Peak memory", "GiB", [Series("peak", memory)], low=0.0),
    ]
