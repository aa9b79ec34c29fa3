"""Reward models: the head, the place its score is read at, padding, and the laws of a step on pairs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, CohereConfig, CohereForCausalLM

from miles.config.schema import Model
from miles.errors import ModelError
from miles.learn.export import export
from miles.learn.learner import Learner
from miles.learn.pack import pack
from miles.learn.parallel import whole
from miles.learn.scorer import as_scorer, load_classifier, load_scorer, sequence_scores, set_padding
from miles.learn.shares import shares
from miles.learn.tiny import FAMILIES, tiny_model, tiny_tokenizer

RATE = 1e-2


def scorer(family="llama", seed=0):
    """A scorer whose head is not zero, so that scores say something."""
    model = as_scorer(tiny_model(family, seed=seed))
    torch.nn.init.normal_(model.score.weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return model


def pairs(groups, count=6, seed=0):
    """Chosen and rejected sequences, each with the place after its last token, as recorded pairs have them."""
    made = []
    for group in groups.draw(count=count, size=2, seed=seed):
        found = []
        for place, sample in enumerate(group.samples):
            ids = [*sample.segments[0].token_ids, 3 + place]
            segment = groups.segment([(ids, False), ([0], True)])
            found.append(replace(groups.sample(segment, reward=1.0 - place), extras={"margin": 0.25}))
        made.append(groups.group(group.ordinal, found))
    return made


def learner(groups, model, **keys):
    keys = {"learner__learning_rate": RATE, "algorithm__groups_per_step": 6, "learner__eps": 1e-3, **keys}
    return Learner(model, groups.recipe(**{"algorithm__name": "reward_model", **keys}))


def train(one, made, steps=2):
    rows = []
    for _ in range(steps):
        step = one.pack(made)
        rows.append(one.update(step, one.score(step)))
    return [{key: value for key, value in row.items() if key != "memory/peak_bytes"} for row in rows]


def own_scores(model, made):
    """[S], by the classifier's own forward, one sequence at a time."""
    sequences = [s.segments[0].token_ids[:-1] for g in made for s in g.samples]
    return torch.cat([model(input_ids=torch.tensor([ids])).logits[:, 0] for ids in sequences])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_score_starts_at_zero_and_the_trunk_is_the_models_own(family):
    model = tiny_model(family)
    made = as_scorer(model)
    assert made.base_model is model.base_model
    assert made.config.num_labels == 1
    assert model.config.num_labels != 1
    assert sequence_scores(made, [[5, 6, 7], [8, 9]]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_packed_rows_are_the_classifiers_own(groups, family):
    made, model = pairs(groups), scorer(family)
    one = learner(groups, model)
    found = one.logprobs(one.pack(made))
    with torch.no_grad():
        assert found.tolist() == pytest.approx(own_scores(model, made).tolist(), abs=1e-5)


def test_padding_that_sequences_end_with_is_replaced_by_a_free_token():
    model, tokenizer = scorer(), tiny_tokenizer()
    sequences = [[1, 5, 6, 2], [1, 7, 2], [1, 9, 9, 9, 9, 2]]
    tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = 2
    alone = [model(input_ids=torch.tensor([ids[:-1]])).logits.item() for ids in sequences]
    early = sequence_scores(model, sequences)
    assert early.tolist() == pytest.approx(alone, abs=1e-5)  # padding with the end token reads one token early
    set_padding(model, tokenizer, {2})
    assert tokenizer.pad_token_id == model.config.pad_token_id == 3
    model.config.pad_token_id = None
    expected = torch.cat([sequence_scores(model, [ids]) for ids in sequences])  # without padding: the last token
    assert sequence_scores(model, sequences).tolist() == expected.tolist()
    model.config.pad_token_id = 3
    assert sequence_scores(model, sequences).tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    set_padding(model, tokenizer, {0, 1, 2, 3})
    assert model.config.pad_token_id is None


PLACEMENTS = {
    "one batch": {},
    "small batches": {"learner__tokens_per_microbatch": 40},
    "one pair a batch": {"learner__tokens_per_microbatch": 1},
    "no sharing": {"learner__prefix_sharing": "off"},
    "no sharing, small batches": {"learner__prefix_sharing": "off", "learner__tokens_per_microbatch": 30},
    "recomputed": {"learner__gradient_checkpointing": True},
}


@pytest.mark.parametrize(
    "keys", [{}, {"learner__epochs": 2, "learner__minibatches": 3}, {"algorithm__centre_coef": 0.1}]
)
def test_a_step_does_not_depend_on_how_pairs_are_packed(groups, keys):
    results = {}
    for name, placement in PLACEMENTS.items():
        one = learner(groups, scorer(), **keys, **placement)
        results[name] = (train(one, pairs(groups)), {n: p.detach().clone() for n, p in one.model.named_parameters()})
    rows, expected = results["one batch"]
    for name, (found, after) in results.items():
        assert max((after[n] - expected[n]).abs().max().item() for n in after) < 1e-5, name
        for a, b in zip(found, rows, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5), name


def test_a_pair_never_stands_in_two_batches(groups):
    made = pairs(groups)
    for sharing in ("auto", "off"):
        one = learner(groups, scorer(), learner__tokens_per_microbatch=20, learner__prefix_sharing=sharing)
        step = one.pack(made)
        batches = [sorted(b.sample_ids[b.loss_mask].tolist()) for b in pack(step, step.samples, one.layout)]
        assert sorted(i for batch in batches for i in batch) == list(range(12))
        assert all(batch[::2] == [i - 1 for i in batch[1::2]] for batch in batches)
        assert len(batches) > 1


def test_a_step_is_plain_transformers(groups):
    """Loss, gradient norm, metrics and new weights against the classifier's own forward, autograd and AdamW."""
    made, model = pairs(groups), scorer()
    one = learner(groups, scorer(), algorithm__centre_coef=0.05)
    (row,) = train(one, made, steps=1)

    scores = own_scores(model, made)
    chosen, rejected = scores[::2], scores[1::2]
    loss = (-logsigmoid(chosen - rejected - 0.25) + 0.05 * (chosen + rejected) ** 2).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0).step()
    assert row["loss/total"] == pytest.approx(loss.item(), abs=1e-6)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert row["pairs/accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert row["pairs/gap"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)
    assert row["score/mean"] == pytest.approx(scores.mean().item(), abs=1e-5)
    assert row["sequences/trained"] == 12
    assert not {"tokens/trained", "loss/policy", "ratio/mean", "kl/old", "entropy", "advantage/mean"} & row.keys()
    for (name, expected), found in zip(model.named_parameters(), one.model.parameters(), strict=True):
        assert (found - expected).abs().max() < 1e-5, name


def test_measuring_changes_nothing_and_says_what_a_step_would(groups):
    made = pairs(groups)
    one = learner(groups, scorer())
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    found = one.measure(made)
    assert all(torch.equal(p, before[name]) for name, p in one.model.named_parameters())
    (row,) = train(one, made, steps=1)
    assert found == pytest.approx({key: row[key] for key in found}, abs=1e-6)
    assert found.keys() == {"loss/total", "pairs/accuracy", "pairs/gap", "score/mean"}


def test_export_loads_as_a_sequence_classifier_with_equal_scores(groups, tmp_path):
    made, model = pairs(groups), scorer("qwen3")
    folder = export(model, tiny_tokenizer(), tmp_path / "rm")
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert loaded.config.num_labels == 1
    assert own_scores(loaded, made).tolist() == pytest.approx(own_scores(model, made).tolist(), abs=1e-6)
    again = load_scorer(Model(name=str(folder)), seed=0)
    assert torch.equal(again.score.weight, model.score.weight)
    learner(groups, again).measure(made)


def test_what_is_no_reward_model_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    causal = export(tiny_model("llama"), tokenizer, tmp_path / "causal")
    with pytest.raises(
        ModelError, match=r"reward.model = .* weights of LlamaForSequenceClassification are not in its files"
    ):
        load_classifier(causal, "reward.model")
    two = as_scorer(tiny_model("llama"))
    two.score = torch.nn.Linear(64, 2, bias=False)
    two.config.num_labels = 2
    with pytest.raises(ModelError, match="has 2 labels; a reward model has one"):
        load_classifier(export(two, tokenizer, tmp_path / "two"), "reward.model")
    with pytest.raises(ModelError, match="could not be loaded"):
        load_classifier(tmp_path / "nothing", "reward.model")


def test_an_architecture_without_a_classifier_is_refused():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = CohereForCausalLM(CohereConfig(**sizes, num_attention_heads=2, pad_token_id=0, eos_token_id=2))
    with pytest.raises(ModelError, match="no sequence classifier for CohereForCausalLM"):
        as_scorer(model)


# --- supervised fine-tuning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sft_is_plain_transformers(groups, family):
    made = groups.draw(count=6, size=1)
    keys = {
        "algorithm__name": "sft",
        "learner__eps": 1e-3,
        "learner__learning_rate": RATE,
        "algorithm__groups_per_step": 6,
    }
    one = Learner(tiny_model(family), groups.recipe(**keys))
    model = tiny_model(family)
    measured = one.measure(made)
    (row,) = train(one, made, steps=1)

    logprobs, entropy = groups.plain_table(model, made)
    loss = -logprobs.mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0).step()
    assert row["loss/total"] == pytest.approx(loss.item(), abs=1e-6)
    assert measured == {"loss/total": pytest.approx(loss.item(), abs=1e-6)}
    assert row["entropy"] == pytest.approx(entropy.mean().item(), abs=1e-5)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert row["tokens/trained"] == len(logprobs)
    for (name, expected), found in zip(model.named_parameters(), one.model.parameters(), strict=True):
        assert (found - expected).abs().max() < 1e-5, name


def test_sft_does_not_depend_on_how_tokens_are_packed(groups):
    results = {}
    for name, placement in PLACEMENTS.items():
        keys = {"algorithm__name": "sft", "learner__eps": 1e-3, "learner__learning_rate": RATE, "learner__epochs": 2}
        one = Learner(tiny_model("llama"), groups.recipe(algorithm__groups_per_step=6, **keys, **placement))
        rows = train(one, groups.draw(count=6, size=1))
        results[name] = (rows, {n: p.detach().clone() for n, p in one.model.named_parameters()})
    rows, expected = results["one batch"]
    for name, (found, after) in results.items():
        assert max((after[n] - expected[n]).abs().max().item() for n in after) < 1e-5, name
        for a, b in zip(found, rows, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5), name


# --- several ranks ---------------------------------------------------------------------------------------------------


def test_a_rank_trains_whole_pairs(groups):
    step = groups.step(pairs(groups))
    for ranks in (2, 4, 7):
        parts = shares(step, step.samples, ranks, True, whole_groups=True)
        assert sorted(i for part in parts for i in part) == list(step.samples)
        assert all(part[::2] == [i - 1 for i in part[1::2]] for part in parts)


def groups_module():
    spec = importlib.util.spec_from_file_location("miles_learn_groups", Path(__file__).with_name("groups.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["miles_learn_groups"] = module
    spec.loader.exec_module(module)
    return module


CASES = {
    "reward_model": {"algorithm__name": "reward_model"},
    "reward_model by lora": {"algorithm__name": "reward_model", "lora__rank": 4, "learner__minibatches": 2},
    "sft": {"algorithm__name": "sft"},
}


def steps_of(groups, keys):
    model = tiny_model("llama") if keys["algorithm__name"] == "sft" else scorer()
    made = groups.draw(count=6, size=1) if keys["algorithm__name"] == "sft" else pairs(groups)
    one = learner(groups, model, **keys)
    rows = train(one, made)
    weights = [whole(p.detach()).flatten().tolist() for p in one.roles.trained("actor").values()]
    return rows, one.measure(made), weights


def job_steps(count: int):
    groups = groups_module()
    return [steps_of(groups, {**keys, "parallel__shard": count}) for keys in CASES.values()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_make_the_steps_of_one_process(gang, groups, ranks):
    results = gang.run(ranks, job_steps, ranks)
    assert all(result == results[0] for result in results[1:])
    for (rows, measured, weights), (name, keys) in zip(results[0], CASES.items(), strict=True):
        expected = steps_of(groups, keys)
        for a, b in zip([*rows, measured], [*expected[0], expected[1]], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5), name
        for a, b in zip(weights, expected[2], strict=True):
            assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-5, name
