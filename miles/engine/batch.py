"""The samples that decode together: who sits in which slot, which prompt each continues, and one step for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.engine.attention import DecodePlan
from miles.engine.kvcache import PromptStore, SampleStore
from miles.engine.policy import LivePolicy
from miles.engine.requests import Call, Row, take
from miles.engine.sampling import draw
from miles.errors import EngineError


@dataclass(eq=False, slots=True)
class _Prompt:
    ids: tuple[int, ...]
    slot: int
    logits: Tensor  # [V], behind its last token: first tokens are drawn from it
    users: int  # calls under way that continue it


class LiveBatch:
    """Prompts and rows in numbered slots. A prompt is stored once for all calls that continue it."""

    def __init__(self, policy: LivePolicy, max_batch: int) -> None:
        self._policy = policy
        self._max_batch = max_batch
        self._prompts: list[_Prompt] = []  # by slot
        self._rows: list[Row | None] = []  # by slot; None: a row has ended and its slot is free
        self._prompt_cache, self._row_cache = PromptStore(), SampleStore()

    @property
    def free(self) -> int:
        """Samples that may begin to decode now."""
        return self._max_batch - sum(row is not None for row in self._rows)

    @property
    def busy(self) -> bool:
        """Whether a step would decode anything."""
        return any(row is not None for row in self._rows)

    @torch.inference_mode()
    def prefill(self, calls: Sequence[Call]) -> dict[Call, EngineError]:
        """Run the prompts that are not here yet, all in one forward, and draw every sample's first token."""
        known = {prompt.ids: prompt for prompt in self._prompts}
        fresh = list(dict.fromkeys(call.ids for call in calls if call.ids not in known))
        if fresh:
            slots = range(len(self._prompts), len(self._prompts) + len(fresh))
            self._prompt_cache.reserve(slots.stop, max(map(len, fresh)))
            logits = self._policy.prefill(self._prompt_cache, fresh, slots)
            for ids, slot, row in zip(fresh, slots, logits, strict=True):
                known[ids] = _Prompt(ids, slot, row, users=0)
                self._prompts.append(known[ids])
        for call in calls:
            call.prompt = known[call.ids]
            call.prompt.users += 1
        rows = [row for call in calls for row in call.rows]
        return self._draw(
            torch.stack([known[call.ids].logits for call in calls]),
            rows,
            [place for place, call in enumerate(calls) for _ in call.rows],
        )

    def place(self, row: Row) -> None:
        """Give a sample that has its first token a slot to decode in."""
        slot = next((i for i, other in enumerate(self._rows) if other is None), len(self._rows))
        if slot == len(self._rows):
            self._rows.append(None)
        self._rows[slot], row.slot = row, slot

    @torch.inference_mode()
    def step(self) -> dict[Call, EngineError]:
        """One more token for every row; rows that end leave. Returns the calls that failed."""
        self._compact()
        size = self._policy.padded_rows(len(self._rows))
        rows = self._rows + [None] * (size - len(self._rows))
        steps = [len(row.token_ids) - 1 if row else 0 for row in rows]
        lengths = [len(row.call.ids) if row else 1 for row in rows]
        self._row_cache.reserve(size, max(steps) + 1)
        prompts = [row.call.prompt.slot if row else -1 for row in rows]
        plan = DecodePlan(
            self._prompt_cache, self._row_cache, prompts, lengths, steps, self._policy.device, self._policy.fewest_rows
        )
        logits = self._policy.decode(
            plan,
            [row.token_ids[-1] if row else 0 for row in rows],
            [length + step for length, step in zip(lengths, steps, strict=True)],
        )
        live = [row for row in self._rows if row]
        failed = self._draw(logits, live, [row.slot for row in live])
        for row in live:
            if row.stop_reason is not None:
                self._free(row)
        return failed

    @torch.inference_mode()
    def remove(self, call: Call, spoiled: bool = False) -> None:
        """Free the call's slots, and its prompt where nobody else continues it; `spoiled` slots are wiped.

        What a mask hides is multiplied by 0, so a slot's next owner must not find NaN behind its own tokens.
        """
        if spoiled:
            self._row_cache.wipe([row.slot for row in call.rows if row.slot >= 0])
        for row in call.rows:
            if row.slot >= 0:
                self._free(row)
        prompt, call.prompt = call.prompt, None
        if prompt is None:
            return
        prompt.users -= 1
        if prompt.users == 0:
            self._drop_prompt(prompt, spoiled)

    def _drop_prompt(self, prompt: _Prompt, spoiled: bool) -> None:
        """The last prompt moves into the free slot, so that prompts stay side by side."""
        last = self._prompts.pop()
        if spoiled:
            self._prompt_cache.wipe([prompt.slot])
        if last is not prompt:
            self._prompt_cache.move([last.slot], [prompt.slot], len(last.ids))
            last.slot = prompt.slot
            self._prompts[last.slot] = last

    def _free(self, row: Row) -> None:
        self._rows[row.slot] = None
        row.slot = -1

    def _draw(self, logits: Tensor, rows: Sequence[Row], places: Sequence[int]) -> dict[Call, EngineError]:
        return take(
            rows,
            draw(
                logits,
                [row.call.temperature for row in rows],
                [row.seed for row in rows],
                [len(row.token_ids) for row in rows],
                places,
            ),
        )

    def _compact(self) -> None:
        """Move rows out of the highest slots where that makes the batch narrower: a copy costs less than a step."""
        live = [row for row in self._rows if row]
        if self._policy.padded_rows(len(live)) == self._policy.padded_rows(len(self._rows)):
            return
        holes = [i for i, row in enumerate(self._rows[: len(live)]) if row is None]
        movers = [row for row in self._rows[len(live) :] if row]
        if movers:
            longest = max(len(row.token_ids) for row in movers)
            self._row_cache.move([row.slot for row in movers], holes, longest)
        for row, hole in zip(movers, holes, strict=True):
            self._rows[hole], row.slot = row, hole
        del self._rows[len(live) :]
