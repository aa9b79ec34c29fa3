"""The report: one safe file over any state of a run, with the run's own numbers."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from miles.errors import MilesError, RunDirError
from miles.observe.report import report_html, write_report
from miles.observe.report_charts import part_chart, time_chart
from miles.observe.report_samples import answers_of, samples_html
from miles.observe.rundir import RunData, read_run

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Checks that every tag is closed, and collects what could reach the network or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.words).append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.words)


def page_of(run_dir: Path) -> tuple[str, Page]:
    text = write_report(run_dir).read_text(encoding="utf-8")
    return text, Page(text)


def test_the_headline_says_what_was_trained_and_how_far_it_came(tmp_path: Path, synthetic: ModuleType) -> None:
    run_dir = synthetic.make_run(tmp_path / "quick", synthetic.Shape())
    text, page = page_of(run_dir)
    data = read_run(run_dir)
    assert page.words[page.words.index("grpo on task:addition · Miles") :]
    before, after = (row["eval/reward/mean"] for row in data.evals)
    assert f"<small>{before:.2f} →</small> {after:.2f}" in text
    greedy = [row["eval/reward/greedy"] for row in data.evals]
    assert f"<small>{greedy[0]:.2f} →</small> {greedy[1]:.2f}" in text
    assert "finished, 16 of 16 steps" in page.text
    assert f"{run_dir}/final" in page.text
    assert "8 prompts × 8 samples a step" in page.text
    assert "1m 37s" in page.text


def test_every_chart_has_title_unit_axes_and_hover_values(tmp_path: Path, synthetic: ModuleType) -> None:
    shape = synthetic.Shape(total=60, written=60, eval_every=20, critic=True, stale=True, drops=True)
    text, page = page_of(synthetic.make_run(tmp_path / "run", shape))
    charts = re.findall(r"<figure.*?</figure>", text, flags=re.S)
    assert len(charts) == 25
    for chart in charts:
        assert re.search(r"<h3>[^<]+</h3>", chart)
        assert re.search(r'<div class="unit">[^<]+</div>', chart)
        assert '<div class="xname">step</div>' in chart
        assert len(re.findall(r'<span style="top:', chart)) >= 3
        assert len(re.findall(r'<span style="left:', chart)) >= 3
        assert "data-chart=" in chart
        assert 'role="img" aria-label="' in chart
    for title in ("Reward", "Policy loss", "Entropy", "KL to the reference", "Ratio", "Gradient norm", "Completion length",
                  "Finished groups", "Staleness", "Time of a step", "Samples", "Peak memory"):  # fmt: skip
        assert f"<h3>{title}</h3>" in text
    assert "dropped: equal_rewards" in page.text


def test_nothing_that_a_model_wrote_can_run_or_fetch(tmp_path: Path, synthetic: ModuleType) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(hostile=True, drops=True))
    rows = synthetic.sample_rows(synthetic.Shape(hostile=True))
    for row in rows:
        row |= {"prompt": synthetic.HOSTILE, "reason": synthetic.HOSTILE, "row": synthetic.HOSTILE}
    synthetic.write_jsonl(run_dir / "samples.jsonl", [*synthetic.sample_rows(synthetic.Shape(hostile=True)), *rows])
    metrics = synthetic.metrics_rows(synthetic.Shape())
    metrics[3] |= {"not_finite": [synthetic.HOSTILE], f"reward/{synthetic.HOSTILE}/mean": 1.0, "groups/dropped/<b>": 1}
    synthetic.write_jsonl(run_dir / "metrics.jsonl", metrics)
    (run_dir / "config.toml").write_text(
        synthetic.recipe_text(synthetic.Shape()).replace("task:addition", "<b onload=x>")
    )
    text, page = page_of(run_dir)
    assert page.tags.count("script") == len(page.scripts) == 1
    assert page.tags.count("b") == 1 + len(
        re.findall('<div class="notice"><b>', text)
    )  # the name of the page, and findings
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    links = [value for name, value in page.attributes if name in ("href", "src", "action", "data", "srcset")]
    assert all(value.startswith("#") for value in links)
    assert not {"img", "link", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\u202e" in text
    assert "url(" not in text
    assert "http" not in re.sub(r'http-equiv="Content-Security-Policy"', "", text)


def test_the_policy_lets_our_own_script_run_and_nothing_else(tmp_path: Path, synthetic: ModuleType) -> None:
    _, page = page_of(synthetic.make_run(tmp_path / "run", synthetic.Shape(written=1)))
    policy = next(value for _, value in page.attributes if value.startswith("default-src"))
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; ")
    assert f"script-src 'sha256-{digest}';" in policy


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_run_that_just_started_has_a_page(tmp_path: Path, synthetic: ModuleType, written: int) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(written=written, finished=False))
    text, page = page_of(run_dir)
    assert ("not finished: step" if written else "just started") in page.text
    assert "nan" not in text.lower().replace("finance", "")
    assert "one measurement so far" in page.text
    assert "No final model yet" in page.text


def test_a_run_directory_with_only_a_recipe_or_only_rows_has_a_page(tmp_path: Path, synthetic: ModuleType) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text(synthetic.recipe_text(synthetic.Shape()))
    assert "No step and no evaluation has been written yet." in page_of(tmp_path / "a")[1].text
    (tmp_path / "b").mkdir()
    synthetic.write_jsonl(tmp_path / "b" / "metrics.jsonl", [{"step": 1, "version": 1, "reward/mean": 0.5}])
    page = page_of(tmp_path / "b")[1]
    assert "config.toml is missing" in page.text
    assert "No sample has been written yet." in page.text


def test_damaged_files_are_read_as_far_as_they_go(tmp_path: Path, synthetic: ModuleType) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(written=5, finished=False))
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n{"step": "six"}\n{"step": 6, "reward/mean": NaN}\n{"step": 7, "rew\xff\xfe')
    with (run_dir / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "samples": [5, {"text": 3, "reward": "x"}]}\n{"step": 2, "samples": 7}\n{"st')
    (run_dir / "config.toml").write_text("[model\n<b>")
    page = page_of(run_dir)[1]
    assert "metrics.jsonl: 2 line(s) could not be read and are left out (7, 10)" in page.text
    assert "samples.jsonl: 1 line(s) could not be read" in page.text
    assert "config.toml is no valid TOML" in page.text
    assert "not finished: step 6" in page.text


def test_the_same_directory_gives_the_same_page(tmp_path: Path, synthetic: ModuleType) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape())
    first = write_report(run_dir).read_bytes()
    assert write_report(run_dir).read_bytes() == first
    assert not (run_dir / "report.html.part").exists()


def test_five_hundred_steps_make_a_page_under_a_mebibyte(tmp_path: Path, synthetic: ModuleType) -> None:
    shape = synthetic.Shape(total=500, written=500, eval_every=50, critic=True, drops=True, stale=True)
    text, _ = page_of(synthetic.make_run(tmp_path / "run", shape))
    assert len(text.encode()) < 2**20
    assert "training, each step" in text


def test_warnings_stand_on_the_page_with_their_advice(tmp_path: Path, synthetic: ModuleType) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape())
    page = page_of(run_dir)[1]
    assert re.search(r"entropy is .*% of the first step's", page.text)
    assert "steps, 1 to 4" in page.text
    synthetic.write_jsonl(run_dir / "metrics.jsonl", [{"step": 1, "version": 1, "reward/mean": 0.5}])
    assert "No warning: entropy, length, gradient and drift stayed in bounds." in page_of(run_dir)[1].text


def test_no_run_and_a_folder_that_takes_no_file_are_said_in_one_sentence(tmp_path: Path, synthetic: ModuleType) -> None:
    with pytest.raises(RunDirError, match="name the folder that `miles train --run` wrote"):
        write_report(tmp_path / "nowhere")
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(written=1))
    (run_dir / "report.html.part").mkdir()
    with pytest.raises(MilesError, match=r"cannot write .*report\.html: Is a directory"):
        write_report(run_dir)


def test_equal_answers_stand_once_with_their_number() -> None:
    def answer(text: str, reward: float | None, stop: str = "stop") -> dict[str, object]:
        return {"text": text, "reward": reward, "tokens": 2, "stop_reason": stop}

    row = {
        "samples": [answer("8", 1.0), answer("9", 0.0), answer("8", 1.0), answer("9", 0.0, "length"), answer("9", None)]
    }
    found = [(a.text, a.reward, a.cut, a.count) for a in answers_of(row)]
    assert found == [("8", 1.0, False, 2), ("9", 0.0, False, 1), ("9", 0.0, True, 1), ("9", None, False, 1)]


def test_one_prompt_is_followed_through_its_steps(synthetic: ModuleType) -> None:
    rows = synthetic.sample_rows(synthetic.Shape(total=80, written=80))
    text = samples_html(rows)
    assert text.count('<ol class="timeline">') == 4  # two held-out prompts, two training prompts
    followed = text[text.index("One prompt through") : text.index("Newest groups")]
    places = [int(step) for step in re.findall(r"step (\d+)", followed)]
    assert places == [1, 10, 20, 30, 40, 50, 60, 70, 80] * 2
    many = [dict(rows[2], step=step) for step in range(1, 101)]
    thin = samples_html(many)
    steps = [int(s) for s in re.findall(r"step (\d+)", thin[: thin.index("Newest groups")])]
    assert (len(steps), steps[0], steps[-1]) == (12, 1, 100)


def test_a_very_long_answer_is_cut_with_a_note() -> None:
    row = {"step": 1, "samples": [{"text": "x" * 10_000, "reward": 0.0}]}
    text = samples_html([row])
    assert "(6,000 characters more)" in text
    assert len(text) < 6_000


def test_the_time_of_a_step_is_split_into_its_stages_and_the_rest() -> None:
    row = {"step": 1, "time/step_s": 10.0, "time/collect_s": 4.0, "time/score_s": 1.0, "time/update_s": 3.0}
    chart = time_chart(RunData(Path("run"), steps=(row,)))
    assert {line.label: [tuple(p) for p in line.points] for line in chart.series} == {
        "collect": [(1, 4.0)],
        "score": [(1, 1.0)],
        "update": [(1, 3.0)],
        "publish": [],
        "other": [(1, 2.0)],
    }


def test_reward_parts_are_shown_where_there_are_several() -> None:
    both = {"step": 1, "reward/mean": 1.0, "reward/a/mean": 0.5, "reward/b/c/mean": 0.25}
    assert [line.label for line in part_chart(RunData(Path("run"), steps=(both,))).series] == ["a", "b/c"]
    one = {"step": 1, "reward/a/mean": 0.5}
    assert part_chart(RunData(Path("run"), steps=(one,))).series == []


def test_trained_groups_have_a_curve_of_their_own_only_where_it_differs(tmp_path: Path, synthetic: ModuleType) -> None:
    rows = synthetic.metrics_rows(synthetic.Shape(written=3))
    plain = RunData(tmp_path, steps=tuple(rows[1:4]))
    assert "groups that were trained" not in report_html(plain)
    rows[2]["reward/trained_mean"] = 0.5
    assert "groups that were trained" in report_html(RunData(tmp_path, steps=tuple(rows[1:4])))
