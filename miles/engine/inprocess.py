"""The engine of one process: samples with the learner's own weights, with nothing to start and nothing to copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from miles.engine.batch import LiveBatch
from miles.engine.owncache import generate_alone
from miles.engine.policy import LivePolicy
from miles.engine.probe import Findings, probe
from miles.engine.requests import Call, Row, check_request, wrapped
from miles.engine.stopping import Stopper
from miles.errors import EngineError
from miles.types import Completion, Sampling

_PREFILL_TOKENS = 2048  # tokens of one prefill, at most, unless one prompt alone is longer: bounds memory and delay


class InProcessEngine:
    """Samples from `model` as its weights are at the moment of the call; satisfies `miles.protocols.Engine`.

    Calls that are under way at the same time decode in one batch: a task steps it while there is work and gives the
    event loop a turn between two steps. Weights must stand still while calls are under way; a version that moves fails
    them. Keys, values and buffers live as long as there is work.

    Log-probabilities are float32 log-softmax values over the whole vocabulary at the sampling temperature (at 1 when
    greedy), as the learner computes them. With `deterministic` a call's tokens and log-probabilities are, bit for bit
    on one machine with one number of threads, a function of weights, ids, sampling and seeds: not of other calls,
    order or `max_batch`. The first call measures whether the machine's products allow that in one batch; where they
    do not, or where a model family's attention is not of a known kind, calls decode one after another, slowly, through
    the model's own cache (`slow_reason` says why; there `max_batch` below 16 also cuts a call).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        version: Callable[[], int],
        end_token_ids: Sequence[int],
        max_batch: int = 64,
        deterministic: bool = True,
    ) -> None:
        """`model`: a Hugging Face causal LM. `tokenizer`: decodes text for stop strings. `version`: of the weights now.

        `end_token_ids`: tokens that end any completion. `max_batch`: samples that decode at the same time, at most.
        """
        if max_batch < 1:
            raise EngineError(f"engine.max_batch must be >= 1, got {max_batch}")
        self._model, self._tokenizer = model, tokenizer
        self._version = version
        self._end_token_ids = tuple(end_token_ids)
        self._max_batch = max_batch
        self._deterministic = deterministic
        self._findings: Findings | None = None
        self._calls: list[Call] = []  # under way, in the order they came
        self._batch: LiveBatch | None = None
        self._alone: tuple[Call, Iterator[None]] | None = None
        self._driver: asyncio.Task[None] | None = None

    @property
    def slow_reason(self) -> str | None:
        """Why calls decode one after another; None where they share a batch, or before the first call."""
        return self._findings.refusal if self._findings else None

    async def generate(
        self, ids: Sequence[int], n: int, sampling: Sampling, seeds: Sequence[int], min_version: int = 0
    ) -> list[Completion]:
        """n completions of the prompt `ids`, one for each seed; see `miles.protocols.Engine`.

        Raises EngineError for a prompt that is empty or too long, for logits that are not finite, for weights older
        than `min_version`, and when the weights change under way.
        """
        config = self._model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        check_request(ids, n, sampling, seeds, context, self._model.get_input_embeddings().weight.shape[0])
        version = self._version()
        if version < min_version:
            raise EngineError(f"tokens of version {min_version} or newer are asked for, but the weights are {version}")
        stopper = Stopper(sampling, self._end_token_ids, self._tokenizer)
        loop = asyncio.get_running_loop()
        call = Call(tuple(ids), sampling, version, stopper, loop.create_future())
        call.rows = [Row(call, seed) for seed in seeds]
        self._start_driver(loop)
        self._calls.append(call)
        try:
            return await call.future
        finally:
            self._forget(call)

    def _start_driver(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._driver is not None and self._driver.get_loop() is not loop:
            self._clear()  # its loop has gone, and the calls with it
            self._driver = None
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive(), name="miles-engine")

    async def _drive(self) -> None:
        try:
            while self._calls:
                try:
                    self._step()
                except Exception as error:
                    self._fail_all(error)
                await asyncio.sleep(0)
        finally:
            self._clear()

    def _step(self) -> None:
        """One forward, or two where a prompt comes in."""
        for call in [call for call in self._calls if call.version != self._version()]:
            reason = f"the weights went from version {call.version} to {self._version()} while they were sampled from"
            self._fail(call, EngineError(f"{reason}: publish between calls, not during one"))
        if not self._calls:
            return
        if self._findings is None:
            self._findings = probe(self._model, self._deterministic)
        if self._findings.refusal is not None:
            self._step_alone()
            return
        if self._batch is None:
            self._batch = LiveBatch(LivePolicy(self._model, self._findings.tiles), self._max_batch)
        self._admit(self._batch)
        if self._batch.busy:
            self._settle(self._batch.step())

    def _admit(self, batch: LiveBatch) -> None:
        """First come, first served: run prompts and give samples a slot while there are free ones."""
        while True:
            for call in self._calls:
                for row in call.waiting()[: batch.free]:
                    batch.place(row)
            chosen, tokens, room = [], 0, batch.free
            for call in self._calls:
                if call.prompt is None and room > 0 and (not chosen or tokens + len(call.ids) <= _PREFILL_TOKENS):
                    chosen.append(call)
                    tokens += len(call.ids)
                    room -= len(call.rows)
            if not chosen:
                return
            self._settle(batch.prefill(chosen))

    def _step_alone(self) -> None:
        if self._alone is None or self._alone[0] not in self._calls:
            self._alone = self._calls[0], generate_alone(self._model, self._calls[0], self._max_batch)
        call, steps = self._alone
        try:
            next(steps)
        except StopIteration:
            self._settle({})
        except EngineError as error:
            self._settle({call: error})

    def _settle(self, failed: dict[Call, EngineError]) -> None:
        """Answer the calls that have failed or are whole."""
        for call, error in failed.items():
            self._fail(call, error)
        for call in [call for call in self._calls if all(row.stop_reason is not None for row in call.rows)]:
            self._forget(call)
            call.finish()

    def _fail(self, call: Call, error: Exception) -> None:
        self._forget(call, spoiled=True)
        if not call.future.done():
            call.future.set_exception(error)

    def _fail_all(self, error: Exception) -> None:
        """An error that belongs to no one call: each caller hears of it, and the engine starts afresh."""
        calls = self._calls
        self._clear()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(wrapped(error))

    def _forget(self, call: Call, spoiled: bool = False) -> None:
        """Free what the call holds; a caller that was cancelled comes here too. `spoiled`: it may have stored NaN."""
        if call in self._calls:
            self._calls.remove(call)
            if self._batch is not None:
                self._batch.remove(call, spoiled)

    def _clear(self) -> None:
        self._calls, self._batch, self._alone = [], None, None
