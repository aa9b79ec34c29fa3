"""A user's own reward file, own data file and own algorithm row, all outside the package, from a recipe and from Python."""

from __future__ import annotations

import inspect
import json
import tempfile
from pathlib import Path

from common import MILES, check, finish, metrics, run, steps

import miles


def same_digit(prompts, completions, answer, **columns):
    return [float(text.strip().startswith(str(a))) for text, a in zip(completions, answer, strict=True)]


def main() -> None:
    example = (Path(__file__).resolve().parents[2] / "examples" / "own_algorithm.py").read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rewards.py").write_text(inspect.getsource(same_digit))
        (folder / "rows.py").write_text(example)
        row = next(line.split("=")[0].strip() for line in example.splitlines() if "= AlgorithmRow(" in line)
        rows = [{"prompt": f"{d} =", "answer": d} for d in range(10)]
        (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        settings = {
            "learner.learning_rate": 3e-3, "learner.betas": [0.9, 0.99], "rollout.max_new_tokens": 1, "eval.rows": 0,
            "algorithm.groups_per_step": 8, "run.checkpoint_every": None, "log.live": "off",
        }  # fmt: skip
        recipe = folder / "own.toml"
        recipe.write_text(
            f'[model]\nname = "tiny-random:llama"\n[data]\nsource = "{folder}/data.jsonl"\n'
            f'[reward]\nfunctions = ["{folder}/rewards.py:same_digit"]\n'
            f'[algorithm]\nname = "{folder}/rows.py:{row}"\nsteps = 60\n'
        )
        flags = [f for k, v in settings.items() for f in (f"--{k}", "none" if v is None else json.dumps(v))]
        flags = [f.strip('"') for f in flags]
        run([*MILES, "train", str(recipe), "--run", str(folder / "one"), *flags], cwd=folder)
        report("recipe", steps(metrics(folder / "one")))
        trained = miles.train(
            model="tiny-random:llama", data=rows, reward=same_digit, algorithm=f"{folder}/rows.py:{row}",
            steps=60, run_dir=folder / "two", **settings,
        )  # fmt: skip
        report("Python", steps(trained.metrics))
        check("Python: model folder", trained.model_dir, (trained.model_dir / "config.json").exists())
    finish()


def report(what: str, rows: list[dict]) -> None:
    curve = [row["reward/mean"] for row in rows]
    rise = sum(curve[-12:]) / 12 - sum(curve[:12]) / 12
    check(f"{what}: reward rises from first to last fifth (>= 0.3)", round(rise, 3), rise >= 0.3)


if __name__ == "__main__":
    main()
