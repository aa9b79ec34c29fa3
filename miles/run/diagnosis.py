"""Why an engine's log-probabilities are not the learner's: each known cause is computed by the learner, and compared with what the engine gave.

A cause is a way in which engines go wrong: another temperature, a cut distribution, another prompt, weights of an older
version in all layers, in the output head or in cached prefixes, rounding. The learner can do all of these on purpose, so a
cause is named where it gives the engine's numbers, and not where it only might.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miles.publish.canary import Difference, Tolerance
from miles.types import Completion

TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOP_K = (2, 5, 10, 20, 50, 100)
BLOCKS = (1, 16, 32, 64, 128)  # tokens: caches keep whole blocks of a prompt
EDGE = 8  # tokens: how much of a prompt's beginning or end may be missing
ROUNDS = 2.0  # times what bf16 makes of the learner's own: no two programs round alike, so it is known by its size
BF16 = (
    "data type: differences of the size that bf16 makes",
    'set engine.param_dtype = "fp32", or learner.param_dtype = "bf16"; or accept it: it is rounding',
)
EXPLAINS = 0.25  # of the difference: what a cause may leave of it where rounding is beside it


@dataclass(frozen=True)
class Answer:
    """One completion of a prompt, with the engine's log-probabilities."""

    prompt: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True)
class Reading:
    """The learner's log-probabilities of all answers' tokens, read in one way; `name` says how, `way_out` what to do about it."""

    name: str
    way_out: str
    logprobs: tuple[float, ...]
    difference: Difference  # from the engine's


@dataclass(frozen=True)
class Diagnosis:
    """`right`: as the learner trains. `cause`: what gives the engine's numbers instead; None: nothing that is known, or no need."""

    engine: tuple[float, ...]
    right: Reading
    agrees: bool
    cause: Reading | None


def diagnose(
    answers: Sequence[Answer],
    learner: Sequence[float],
    model: Any,
    before: Any,
    *,
    temperature: float,
    tolerance: Tolerance,
) -> Diagnosis:
    """`learner`: its log-probabilities of the answers' tokens. `model`: its model now; `before`: a copy at the version before.

    The engine has served both versions, and the same prompts at each.
    """
    engine = tuple(value for answer in answers for value in answer.completion.logprobs)
    right = Reading("as the learner trains", "", tuple(learner), Difference.between(engine, learner))
    if tolerance.holds(right.difference):
        return Diagnosis(engine, right, True, None)
    now = [logits(model, answer.prompt, answer.completion.token_ids) for answer in answers]

    def read(name: str, way_out: str, tables: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Reading:
        values = tuple(
            value
            for answer, table in zip(answers, tables, strict=True)
            for value in taken(change(table), answer.completion.token_ids)
        )
        return Reading(name, way_out, values, Difference.between(engine, values))

    at = partial(torch.mul, other=1 / temperature)
    found = [
        *(read(*cause, now, change) for cause, change in _distributions(temperature)),
        *(read(*cause, tables, at) for cause, tables in _models(answers, model, before)),
        *(read(*cause, tables, at) for cause, tables in _prompts(answers, model)),
    ]
    finite = [reading for reading in found if math.isfinite(reading.difference.mean)]
    best = min(finite, key=lambda reading: reading.difference.mean, default=None)
    limit = EXPLAINS * (right.difference.mean if math.isfinite(right.difference.mean) else 0.0)
    if best is None or not (tolerance.holds(best.difference) or best.difference.mean < limit):
        rounded = deepcopy(model).to(torch.bfloat16)
        tables = [logits(rounded, answer.prompt, answer.completion.token_ids) for answer in answers]
        best = read(*BF16, tables, at)
        noise = Difference.between(best.logprobs, learner)
        if not (right.difference.mean <= ROUNDS * noise.mean and right.difference.high <= ROUNDS * noise.high):
            best = None
    return Diagnosis(engine, right, False, best)


# --- what the learner computes ---------------------------------------------------------------------------------------


def logits(model: Any, prompt: Sequence[int], tokens: Sequence[int], past: Any = None, read: int = 0) -> Tensor:
    """[n, V] float32 that predict the tokens; `past` holds the keys and values of the prompt's first `read` tokens."""
    ids = torch.tensor([[*prompt, *tokens][read:]], device=model.device)
    with torch.no_grad():
        out = model(ids, past_key_values=past, use_cache=past is not None)
    start = len(prompt) - 1 - read
    return out.logits[0, start : start + len(tokens)].float()


def taken(table: Tensor, tokens: Sequence[int]) -> list[float]:
    """log-softmax of [n, V], at the tokens."""
    return table.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()


# --- the causes: (name, way out), and what gives their numbers -------------------------------------------------------


def _distributions(temperature: float) -> Iterator[tuple[tuple[str, str], Callable[[Tensor], Tensor]]]:
    for other in TEMPERATURES:
        if abs(other - temperature) > 1e-6:
            yield (
                (
                    f"temperature {other:g} instead of {temperature:g}",
                    "the engine must return log-probabilities at rollout.temperature (vLLM: --logprobs-mode processed_logprobs)",
                ),
                partial(torch.mul, other=1 / other),
            )
    way_out = "sample from the whole distribution: the learner trains all of it (top-p 1, top-k 0, min-p 0)"
    for p in TOP_P:
        yield (f"top-p {p:g}", way_out), partial(_nucleus, temperature=temperature, p=p)
    for k in TOP_K:
        yield (f"top-k {k}", way_out), partial(_largest, temperature=temperature, k=k)


def _nucleus(table: Tensor, temperature: float, p: float) -> Tensor:
    """Logits outside of the smallest set of tokens whose mass is at least p are -inf."""
    table = table / temperature
    ordered, places = table.softmax(-1).sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= p
    return table.masked_fill(torch.zeros_like(outside).scatter(-1, places, outside), float("-inf"))


def _largest(table: Tensor, temperature: float, k: int) -> Tensor:
    table = table / temperature
    if k >= table.shape[-1]:
        return table
    return table.masked_fill(table < table.topk(k, -1).values[..., -1:], float("-inf"))


def _models(answers: Sequence[Answer], model: Any, before: Any) -> Iterator[tuple[tuple[str, str], list[Tensor]]]:
    def each(compute: Callable[[Sequence[int], Sequence[int]], Tensor]) -> list[Tensor]:
        return [compute(answer.prompt, answer.completion.token_ids) for answer in answers]

    yield (
        (
            "unsynced weights: those of the version before",
            "the new version did not reach the engine: look at its log, and leave publish.verify on",
        ),
        each(partial(logits, before)),
    )
    yield (
        (
            "the output head of the version before (a tied head that was not updated with its embedding)",
            "the server must process the head again after a load (Miles' plugin does; another server may not)",
        ),
        each(partial(_old_head, model, before)),
    )
    for block in BLOCKS:
        yield (
            (
                f"a stale cache: keys and values of the version before for the prompt (blocks of {block})",
                "the engine must forget cached prefixes at each version, or keep them apart by version",
            ),
            each(partial(_stale_cache, model, before, block)),
        )


def _old_head(model: Any, before: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """As `logits`, with the hidden states of one model and the head of the other."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    with torch.no_grad():
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        table = before.get_output_embeddings()(hidden)
    return table[0, len(prompt) - 1 : -1].float()


def _stale_cache(model: Any, before: Any, block: int, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """The prompt's whole blocks, its last token never among them, were read by the model before."""
    read = (len(prompt) - 1) // block * block
    if not read:
        return logits(model, prompt, tokens)
    with torch.no_grad():
        past = before(torch.tensor([prompt[:read]], device=model.device), use_cache=True).past_key_values
    return logits(model, prompt, tokens, past, read)


def _prompts(answers: Sequence[Answer], model: Any) -> Iterator[tuple[tuple[str, str], list[Tensor]]]:
    way_out = "the engine must get the learner's token ids as they are: no template or tokenizer of its own"
    changes: list[tuple[str, Callable[[tuple[int, ...]], tuple[int, ...]]]] = [
        ("template: its first token twice", lambda ids: (ids[0], *ids))
    ]
    for count in range(1, EDGE + 1):
        changes.append((f"template: the prompt without its first {count} tokens", partial(_without_first, count)))
        changes.append((f"template: the prompt without its last {count} tokens", partial(_without_last, count)))
    for name, change in changes:
        prompts = [change(answer.prompt) for answer in answers]
        if all(prompts):
            pairs = zip(prompts, answers, strict=True)
            yield (name, way_out), [logits(model, prompt, answer.completion.token_ids) for prompt, answer in pairs]


def _without_first(count: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    return ids[count:]


def _without_last(count: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    return ids[:-count]
