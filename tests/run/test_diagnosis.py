"""An engine that goes wrong in one known way is found out, and only that way is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch

from miles.learn.tiny import tiny_model, tiny_tokenizer
from miles.publish.canary import Tolerance
from miles.run.agreement import print_agreement
from miles.run.diagnosis import Answer, Diagnosis, diagnose
from miles.types import Completion

PROMPTS = [tuple((5 * place + 7 * start) % 30 + 2 for place in range(40)) for start in range(3)]
NEW = 12
TEMPERATURE = 0.7


class Models:
    """The learner's model, a copy at the version before, and what they say."""

    def __init__(self, tied: bool) -> None:
        self.before = tiny_model("llama", tied, head_dim=32)
        for parameter in self.before.parameters():
            if parameter.dim() == 2:
                parameter.data.mul_(4)
        self.now = moved(self.before)

    def diagnose(self, answers: Sequence[Answer], dtype: str = "fp32") -> Diagnosis:
        ours = [value for answer in answers for value in scored(self.now, answer.prompt, answer.completion.token_ids)]
        return diagnose(answers, ours, self.now, self.before, temperature=TEMPERATURE, tolerance=Tolerance.of(dtype))


def moved(model: Any) -> Any:
    other = deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in other.parameters():
        parameter.data.add_(
            0.1 * parameter.data.square().mean().sqrt() * torch.randn(parameter.shape, generator=generator)
        )
    return other


def next_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].float()


def scored(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    ids = [*prompt, *tokens]
    with torch.no_grad():
        table = model(torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return (table / TEMPERATURE).log_softmax(-1)[range(len(tokens)), list(tokens)].tolist()


def sample(prompt: tuple[int, ...], says: Callable[[list[int]], torch.Tensor], seed: int) -> Answer:
    """An engine: `says(tokens so far)` are log-probabilities of the next token, which it samples from and returns."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(NEW):
        row = says(tokens)
        token = int(torch.multinomial(row.exp(), 1, generator=generator))
        tokens.append(token)
        logprobs.append(float(row[token]))
    return Answer(prompt, Completion(tuple(tokens), tuple(logprobs), (), "length"))


def engine(says: Callable[[tuple[int, ...], list[int]], torch.Tensor]) -> list[Answer]:
    return [sample(prompt, lambda tokens, p=prompt: says(p, tokens), seed) for seed, prompt in enumerate(PROMPTS)]


def at(row: torch.Tensor, temperature: float = TEMPERATURE) -> torch.Tensor:
    return (row / temperature).log_softmax(-1)


def kept(row: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return at(row).masked_fill(~mask, float("-inf")).log_softmax(-1)


def nucleus(row: torch.Tensor, p: float) -> torch.Tensor:
    mass, mask = 0.0, torch.zeros(len(row), dtype=torch.bool)
    for token in at(row).argsort(descending=True).tolist():
        if mass >= p:
            break
        mask[token] = True
        mass += float(at(row)[token].exp())
    return kept(row, mask)


def right(m: Models) -> list[Answer]:
    return engine(lambda p, t: at(next_logits(m.now, [*p, *t])))


def raw_logprobs(m: Models) -> list[Answer]:
    """Samples at the temperature, and returns log-probabilities at 1."""
    answers = right(m)
    out = []
    for answer in answers:
        ids = [*answer.prompt, *answer.completion.token_ids]
        rows = [next_logits(m.now, ids[: len(answer.prompt) + i]) for i in range(NEW)]
        values = tuple(float(at(row, 1.0)[t]) for row, t in zip(rows, answer.completion.token_ids, strict=True))
        out.append(Answer(answer.prompt, Completion(answer.completion.token_ids, values, (), "length")))
    return out


def hotter(m: Models) -> list[Answer]:
    return engine(lambda p, t: at(next_logits(m.now, [*p, *t]), 1.3))


def top_p(m: Models) -> list[Answer]:
    return engine(lambda p, t: nucleus(next_logits(m.now, [*p, *t]), 0.8))


def top_k(m: Models) -> list[Answer]:
    def says(p: tuple[int, ...], t: list[int]) -> torch.Tensor:
        row = next_logits(m.now, [*p, *t])
        return kept(row, row >= row.topk(5).values[-1])

    return engine(says)


def two_begins(m: Models) -> list[Answer]:
    return engine(lambda p, t: at(next_logits(m.now, [p[0], *p, *t])))


def no_turn(m: Models) -> list[Answer]:
    return engine(lambda p, t: at(next_logits(m.now, [*p[:-3], *t])))


def unsynced(m: Models) -> list[Answer]:
    return engine(lambda p, t: at(next_logits(m.before, [*p, *t])))


def stale_head(m: Models) -> list[Answer]:
    """vLLM's fault on a CPU: the embedding is new, and the product with it runs on an old copy."""
    mixed = tiny_model("llama", False, head_dim=32)
    weights = {**m.now.state_dict(), "lm_head.weight": m.before.get_output_embeddings().weight.detach()}
    mixed.load_state_dict(weights)
    return engine(lambda p, t: at(next_logits(mixed, [*p, *t])))


def stale_cache(m: Models) -> list[Answer]:
    """The first 32 tokens of each prompt were read by the version before."""

    def says(p: tuple[int, ...], t: list[int]) -> torch.Tensor:
        ids = [*p, *t]
        with torch.no_grad():
            past = m.before(torch.tensor([ids[:32]]), use_cache=True).past_key_values
            return at(m.now(torch.tensor([ids[32:]]), past_key_values=past, use_cache=True).logits[0, -1].float())

    return engine(says)


def bf16(m: Models) -> list[Answer]:
    rounded = deepcopy(m.now).to(torch.bfloat16)
    return engine(lambda p, t: at(next_logits(rounded, [*p, *t])))


FAULTS = {
    raw_logprobs: "temperature 1 instead of 0.7",
    hotter: "temperature 1.3 instead of 0.7",
    top_p: "top-p 0.8",
    top_k: "top-k 5",
    two_begins: "template: its first token twice",
    no_turn: "template: the prompt without its last 3 tokens",
    unsynced: "unsynced weights: those of the version before",
    stale_head: "the output head of the version before (a tied head that was not updated with its embedding)",
    stale_cache: "a stale cache: keys and values of the version before for the prompt (blocks of 32)",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("tied", [True, False])
def test_each_fault_is_named(fault: Callable[[Models], list[Answer]], tied: bool) -> None:
    models = Models(tied)
    found = models.diagnose(fault(models))
    assert not found.agrees
    assert found.cause is not None
    # Blocks of 16 and of 32 hold the same 32 tokens of these prompts.
    assert found.cause.name.replace("blocks of 16", "blocks of 32") == FAULTS[fault]
    assert found.cause.way_out
    assert found.cause.difference.mean < 0.25 * found.right.difference.mean


def test_the_table_shows_what_the_cause_gives(capsys: pytest.CaptureFixture[str]) -> None:
    models = Models(True)
    answers = top_p(models)
    found = models.diagnose(answers)
    tokens = [token for answer in answers for token in answer.completion.token_ids]
    print_agreement(found, tokens, tiny_tokenizer())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["token", "engine", "learner", "difference", "cause"]
    assert lines[2].split()[-4] == lines[2].split()[-1] == f"{found.engine[0]:.5f}"
    assert lines[-2].startswith(f"worst difference of {3 * NEW} tokens: ")
    assert lines[-2].endswith(", more than rounding")
    assert lines[-1].startswith("likely cause: top-p 0.8; that leaves ")


def test_an_engine_that_is_right_needs_no_cause() -> None:
    models = Models(True)
    found = models.diagnose(right(models))
    assert found.agrees
    assert found.cause is None
    assert found.right.difference.worst < 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_rounding_is_known_by_its_size(tied: bool) -> None:
    models = Models(tied)
    found = models.diagnose(bf16(models))
    assert not found.agrees
    assert found.cause is not None
    assert found.cause.name == "data type: differences of the size that bf16 makes"


def test_rounding_is_no_fault_of_an_engine_in_bf16() -> None:
    models = Models(True)
    assert models.diagnose(bf16(models), "bf16").agrees


def test_what_no_known_cause_explains_is_not_given_one() -> None:
    models = Models(True)
    stranger = moved(moved(models.now))
    for parameter in stranger.parameters():
        parameter.data = parameter.data.roll(1, 0)
    found = models.diagnose(engine(lambda p, t: at(next_logits(stranger, [*p, *t]))))
    assert not found.agrees
    assert found.cause is None


def test_answers_that_are_no_numbers_agree_with_nothing() -> None:
    models = Models(True)
    answers = right(models)
    spoiled = Completion(answers[0].completion.token_ids, (float("nan"),) * NEW, (), "length")
    found = models.diagnose([Answer(PROMPTS[0], spoiled), *answers[1:]])
    assert not found.agrees
    assert found.cause is None
