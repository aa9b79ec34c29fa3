from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from miles.config.schema import Data, Recipe, Rollout
from miles.env.environment import MultiTurn, SingleTurn, build_environment
from miles.env.reward import build_rewards
from miles.env.tasks import GuessNumber, find
from miles.env.template import Renderer
from miles.env.trajectory import turn_seed
from miles.errors import ConfigError, EpisodeError
from miles.types import Sample, Sampling

END = 4
ROW = {"prompt": "3, 4, 5 ?", "secret": 5}
SAMPLING = Sampling(max_new_tokens=8)


@pytest.fixture
def renderer(make_tokenizer) -> Renderer:
    return Renderer(make_tokenizer("chatml"), Data())


@pytest.fixture
def say(renderer, make_completion):
    """The completion of a text, ended by the model unless it is cut."""
    return lambda text, cut=False: make_completion(
        [*renderer.codec.encode(text), *([] if cut else [END])], "length" if cut else "stop"
    )


def play(renderer, engine, dialogue=GuessNumber, seeds=(11,), **options) -> list[Sample]:
    environment = MultiTurn(dialogue, renderer, **options)
    return asyncio.run(environment.episodes(ROW, engine, SAMPLING, seeds))


def spoken(renderer, sample: Sample) -> str:
    """The trained tokens of a sample, decoded."""
    return "".join(
        renderer.codec.decode([t for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m]) for s in sample.segments
    )


def test_single_turn_asks_once_for_all_seeds(renderer, say, make_engine):
    engine = make_engine([[say("5"), say("44", cut=True)]])
    samples = asyncio.run(SingleTurn(renderer).episodes(ROW, engine, SAMPLING, [1, 2]))
    prompt = renderer.prompt(ROW)
    assert engine.asked == [(prompt.ids, SAMPLING, (1, 2))]
    assert [(s.text, s.stop_reason, s.truncated) for s in samples] == [("5", "stop", False), ("44", "length", True)]
    assert samples[0].segments[0].token_ids == prompt.ids + say("5").token_ids
    assert samples[0].segments[0].loss_mask == (False,) * len(prompt.ids) + (True,) * 2
    assert samples[1].num_trained == 2  # cut: no end token is put behind it


def test_two_turns_train_the_models_tokens_and_not_the_hint(renderer, say, make_engine):
    engine = make_engine([[say("4"), say("5")], [say("5")]])
    samples = play(renderer, engine, seeds=(11, 12), max_turns=2)
    assert [s.reward_parts for s in samples] == [{"environment": 1.0}, {"environment": 1.0}]
    assert [s.text for s in samples] == ["4\n5", "5"]
    (segment,) = samples[0].segments
    assert spoken(renderer, samples[0]) == "4<|im_end|>5<|im_end|>"
    assert "higher" in renderer.codec.decode(segment.token_ids)
    assert [v for v, m in zip(segment.versions, segment.loss_mask, strict=True) if not m] == [-1] * (
        len(segment.token_ids) - 4
    )
    # The second prompt is what the model saw and said, and then the hint.
    assert segment.token_ids[: len(engine.asked[1][0])] == engine.asked[1][0]
    assert engine.asked[1][2] == (turn_seed(11, 1),)
    assert len(samples[1].segments[0].token_ids) < len(segment.token_ids)


def test_turns_end_at_the_limit_at_a_cut_answer_and_at_the_end_of_the_context(renderer, say, make_engine):
    at_limit = play(renderer, make_engine([[say("4")], [say("3")]]), max_turns=2)[0]
    assert (at_limit.text, at_limit.truncated, at_limit.reward_parts) == ("4\n3", False, {"environment": 0.0})
    cut = play(renderer, make_engine([[say("4")], [say("5", cut=True)]]), max_turns=5)[0]
    assert (cut.text, cut.truncated, cut.reward_parts) == ("4\n5", True, {"environment": 1.0})
    cut_at_once = play(renderer, make_engine([[say("4", cut=True)]]), max_turns=5)[0]
    assert (cut_at_once.text, cut_at_once.truncated) == ("4", True)
    room = len(renderer.prompt(ROW).ids) + SAMPLING.max_new_tokens
    full = play(renderer, make_engine([[say("4")]]), max_turns=5, context=room)[0]
    assert (full.text, full.truncated) == ("4", True)


class Tool:
    """Answers everything with the right number, as a tool would."""

    def __init__(self, row, seed):
        self.calls = 0

    async def respond(self, answer):
        self.calls += 1
        return [{"role": "tool", "content": "42"}] if self.calls == 1 else None


def test_the_reward_reads_the_models_words_and_not_the_tools(renderer, say, make_engine):
    samples = play(renderer, make_engine([[say("call")], [say("I don't know")]]), Tool)
    assert samples[0].reward_parts == {}
    assert "42" in renderer.codec.decode(samples[0].segments[0].token_ids)
    scored = asyncio.run(
        build_rewards(Recipe().reward, functions="exact_number").score(0, {**ROW, "answer": 42}, samples)
    )
    assert (scored[0].text, scored[0].reward) == ("call\nI don't know", 0.0)


def test_a_rendering_that_is_no_extension_begins_a_new_segment(make_tokenizer, make_completion, make_engine):
    renderer = Renderer(make_tokenizer("forgets_thoughts"), Data())
    thought = make_completion([*renderer.codec.encode("<think>x</think>4"), END])
    right = make_completion([*renderer.codec.encode("5"), END])
    engine = make_engine([[thought], [right]])
    (sample,) = play(renderer, engine, max_turns=2)
    assert [segment.num_trained for segment in sample.segments] == [len(thought.token_ids), 2]
    assert spoken(renderer, sample) == "<think>x</think>4<|im_end|>5<|im_end|>"
    assert sample.segments[1].token_ids[:-2] == engine.asked[1][0]
    assert sample.num_trained == len(thought.token_ids) + 2


class Broken:
    closed = 0

    def __init__(self, row, seed):
        if row["secret"] == "init":
            raise ValueError("no such game")

    def respond(self, answer):
        return {"raise": lambda: 1 / 0, "number": lambda: 7, "empty": list, "bad": lambda: [{"x": 1}]}[answer]()

    def reward(self):
        return 0.0

    def close(self):
        Broken.closed += 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("raise", r"Broken.respond raised ZeroDivisionError"),
        ("number", r"Broken.respond must return text, a list of chat messages or None, got 7"),
        ("empty", r"got \[\]"),
        ("bad", r"gave \[\{'x': 1\}\]: it must hold messages like"),
    ],
)
def test_a_broken_dialogue_is_named_and_always_closed(renderer, say, make_engine, answer, message):
    before = Broken.closed
    with pytest.raises(EpisodeError, match=message):
        play(renderer, make_engine([[say(answer)]]), Broken)
    assert Broken.closed == before + 1


def test_a_dialogue_that_cannot_be_made_or_is_stuck_is_named(renderer, say, make_engine):
    class Stuck(Broken):
        async def respond(self, answer):
            await asyncio.sleep(60)

    with pytest.raises(EpisodeError, match=r"Stuck.respond took longer than 0.05 s"):
        play(renderer, make_engine([[say("x")]]), Stuck, timeout_s=0.05)
    environment = MultiTurn(Broken, renderer)
    with pytest.raises(EpisodeError, match=r"Broken.__init__ raised ValueError: no such game"):
        asyncio.run(environment.episodes({**ROW, "secret": "init"}, make_engine([[say("x")]]), SAMPLING, [1]))


# --- building --------------------------------------------------------------------------------------------------------


def test_the_recipe_then_the_task_then_one_turn(renderer, tmp_path):
    assert isinstance(build_environment(Recipe(), renderer)[0], SingleTurn)
    assert isinstance(build_environment(Recipe(), renderer, task=find("task:addition"))[0], SingleTurn)
    environment, scores = build_environment(Recipe(), renderer, task=find("task:guess_number"))
    assert isinstance(environment, MultiTurn)
    assert scores
    (tmp_path / "mine.py").write_text(
        "class Whole:\n    scores = True\n    def __init__(self, renderer, recipe):\n        self.given = renderer, recipe\n"
        "    async def episodes(self, row, engine, sampling, seeds):\n        return []\n"
        "class Talk:\n    def __init__(self, row, seed): ...\n    def respond(self, answer):\n        return None\n"
        "class Neither: ...\n"
    )
    recipe = Recipe(rollout=Rollout(environment=f"{tmp_path}/mine.py:Whole"))
    whole, scores = build_environment(recipe, renderer, task=find("task:guess_number"))
    assert whole.environment.given == (renderer, recipe)
    assert scores
    talk, scores = build_environment(Recipe(rollout=Rollout(environment=f"{tmp_path}/mine.py:Talk")), renderer)
    assert isinstance(talk, MultiTurn)
    assert not scores
    with pytest.raises(ConfigError, match="has neither `respond`"):
        build_environment(Recipe(rollout=Rollout(environment=f"{tmp_path}/mine.py:Neither")), renderer)


def test_the_example_environment_gives_half_for_a_second_right_answer(renderer, say, make_engine):
    file = Path(__file__).parents[2] / "examples" / "own_environment.py"
    recipe = Recipe(rollout=Rollout(environment=f"{file}:SecondChance", max_turns=2))
    environment, scores = build_environment(recipe, renderer)
    engine = make_engine([[say("7")], [say("8")]])
    samples = asyncio.run(environment.episodes({"prompt": "a", "answer": 8}, engine, SAMPLING, [1]))
    assert scores
    assert samples[0].reward_parts == {"environment": 0.5}


# --- what a user's environment may do wrong -----------------------------------------------------------------------------


class Quitter(Broken):
    async def respond(self, answer):
        sys.exit(0)


class Canceller(Broken):
    async def respond(self, answer):
        asyncio.current_task().cancel()
        await asyncio.sleep(60)


class Half(Broken):
    def respond(self, answer):
        return "a\ud800"


class Number(Broken):
    def respond(self, answer):
        return [{"role": "user", "content": 5}]


class BreaksTwice(Broken):
    def respond(self, answer):
        raise ValueError("first")

    def close(self):
        raise ValueError("second")


@pytest.mark.parametrize(
    ("dialogue", "message"),
    [
        (Quitter, "Quitter.respond raised RuntimeError: SystemExit: 0"),
        (Canceller, "Canceller.respond raised RuntimeError: CancelledError, and nobody else had cancelled it"),
        (Half, r"it holds half a character \('\\ud800' at place 5\)"),
        (Number, "it has a message whose content must be text, got int: 5"),
        (BreaksTwice, "BreaksTwice.respond raised ValueError: first"),
    ],
)
def test_a_dialogue_that_ends_or_cancels_itself_is_an_error_of_its_group(
    dialogue, message, renderer, say, make_engine, caplog
):
    with pytest.raises(EpisodeError, match=message):
        play(renderer, make_engine([[say("x")]]), dialogue)
    assert ("BreaksTwice.close raised ValueError: second, after another failure" in caplog.text) == (
        dialogue is BreaksTwice
    )


def test_a_dialogue_may_change_its_row_and_nobody_else_sees_it(renderer, say, make_engine):
    class Changes(GuessNumber):
        def __init__(self, row, seed):
            super().__init__(row, seed)
            row["prompt"] = "changed"
            row["list"].append(1)

    row = {**ROW, "list": []}
    environment = MultiTurn(Changes, renderer, max_turns=1)
    asyncio.run(environment.episodes(row, make_engine([[say("5"), say("5")]]), SAMPLING, [1, 2]))
    assert row == {**ROW, "list": []}


OWN = """
class Right:
    def __init__(self, renderer, recipe): pass
    async def episodes(self, row, engine, sampling, seeds):
        return self.give(row)
    def give(self, row): return []
class Nothing(Right):
    def give(self, row): return None
class Numbers(Right):
    def give(self, row): return [1, 2]
class Raises(Right):
    def give(self, row): raise KeyError("x")
class Leaves(Right):
    def give(self, row): raise SystemExit(0)
class Plain(Right):
    def episodes(self, row, engine, sampling, seeds): return []
class Short(Right):
    async def episodes(self, row): return []
class NoInit(Right):
    def __init__(self): pass
class InitRaises(Right):
    def __init__(self, renderer, recipe): raise ValueError("no game")
class Dialogue:
    def respond(self, answer): return None
made = Right(None, None)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Plain", "`episodes` must be an `async def`"),
        ("Short", r"`episodes`\(row\) cannot be called with \(row, engine, sampling, seeds\)"),
        ("NoInit", r"NoInit\(\) cannot be called with \(renderer, recipe\)"),
        ("InitRaises", "could not be made: ValueError: no game"),
        ("Dialogue", r"Dialogue\(\) cannot be called with \(row, seed\)"),
        ("made", "which cannot be called with .renderer, recipe.: name a class"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_before_training(name, message, renderer, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    recipe = Recipe(rollout=Rollout(environment=f"{tmp_path / 'own.py'}:{name}"))
    with pytest.raises(ConfigError, match=message):
        build_environment(recipe, renderer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", r"Nothing.episodes must return one miles.types.Sample for each seed, got None"),
        ("Numbers", r"got \[1, 2\]"),
        ("Raises", "Raises.episodes raised KeyError: 'x'"),
        ("Leaves", "Leaves.episodes raised RuntimeError: SystemExit: 0"),
    ],
)
def test_an_environment_that_breaks_its_contract_is_an_error_of_its_group(name, message, renderer, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    environment, _ = build_environment(Recipe(rollout=Rollout(environment=f"{tmp_path / 'own.py'}:{name}")), renderer)
    with pytest.raises(EpisodeError, match=message):
        asyncio.run(environment.episodes(ROW, None, SAMPLING, [1, 2]))
