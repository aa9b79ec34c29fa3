"""Trains every row of the table of algorithms, and two controls, on a tiny task from scratch, and draws their curves."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import miles
from miles.algo import ROWS
from miles.env.tasks import first_digit
from miles.errors import NothingToTrain
from miles.observe.rows import METRICS_FILE, read_rows

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "tiny_echo.toml"
DEALER = random.Random(0)


def settings(name: str) -> dict[str, object]:
    """Rows with a ratio make 2 x 2 updates a step, so that the ratio differs from 1; the others one, in twice the steps."""
    updates = 1 if ROWS[name].one_update else 2
    chosen: dict[str, object] = {
        "algorithm.name": name, "learner.epochs": updates, "learner.minibatches": updates, "log.live": "off",
    }  # fmt: skip
    if ROWS[name].one_update:
        chosen["algorithm.steps"] = 120
    if name == "vapo":
        chosen |= {"algorithm.vapo_alpha": 1.0, "algorithm.critic_warmup": 0}
    return chosen


def train(folder: Path, label: str, **chosen: object) -> dict[str, object]:
    reward = chosen.pop("reward", None)
    try:
        miles.train(recipe=RECIPE, run_dir=folder / label, reward=reward, **chosen)
    except NothingToTrain as solved:  # a row that drops solved groups ends when it has solved all of them
        print(f"{label}: {str(solved).splitlines()[0]}", flush=True)
    rows = [row for row in read_rows(folder / label / METRICS_FILE).rows if "event" not in row]
    curve = [row["reward/mean"] for row in rows]
    fifth = max(1, len(curve) // 5)
    result: dict[str, object] = {
        "curve": curve, "rise": sum(curve[-fifth:]) / fifth - sum(curve[:fifth]) / fifth,
    }  # fmt: skip
    clipped = [row["ratio/clip_fraction"] for row in rows if "ratio/clip_fraction" in row]
    if clipped and chosen["learner.epochs"] != 1:  # one update a step has nothing to clip
        result["clip_fraction"] = max(clipped)
    return result


def shuffled(prompts: list[str], completions: list[str], **columns: list[object]) -> list[float | None]:
    """The rewards of the group, dealt out anew: the same spread and mean, and nothing to learn from."""
    rewards = first_digit(prompts, completions, **columns)
    DEALER.shuffle(rewards)
    return rewards


def draw(results: dict[str, dict[str, dict]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 5, figsize=(15, 10), sharex=True, sharey=True)
    shown = {**results["rows"], **{f"control: {k}": v for k, v in results["controls"].items()}}
    for axis, (name, result) in zip(axes.flat, shown.items(), strict=False):
        axis.plot(result["curve"], color="tab:gray" if name.startswith("control") else "tab:blue")
        axis.set_title(name, fontsize=10)
        axis.set_ylim(-0.05, 1.05)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    figure.supxlabel("step")
    figure.supylabel("mean reward of the step's samples")
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON of the curves")
    parser.add_argument("--picture", type=Path, help="PNG of the curves")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help="only these rows")
    args = parser.parse_args()
    results: dict[str, dict[str, dict]] = {"rows": {}, "controls": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.perf_counter()
        for row in args.rows:
            begun = time.perf_counter()
            results["rows"][row] = train(folder, row, **settings(row))
            print(
                f"{row:24s} rise {results['rows'][row]['rise']:+.2f}  {time.perf_counter() - begun:.1f} s", flush=True
            )
        seconds = time.perf_counter() - started
        controls = {"shuffled rewards": {"reward": shuffled}, "learning rate 0": {"learner.learning_rate": 0.0}}
        for label, changes in controls.items():
            results["controls"][label] = train(folder, label.replace(" ", "_"), **{**settings("grpo"), **changes})
            print(f"{label:24s} rise {results['controls'][label]['rise']:+.2f}", flush=True)
    args.out.write_text(json.dumps({**results, "seconds_rows": seconds}))
    if args.picture:
        draw(results, args.picture)


if __name__ == "__main__":
    main()
