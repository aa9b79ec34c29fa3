"""The engine behind HTTP: sends every sample to one of several vLLM servers and hands on whole answers alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from miles.engine.fleet import Fleet, Server
from miles.engine.requests import check_request
from miles.engine.stopping import Stopper
from miles.engine.vllm_routes import (
    ADAPTER,
    GENERATE,
    NOTHING_TO_SHOW,
    Access,
    NotANumber,
    Progress,
    async_client,
    listening,
    parse_answer,
    parse_progress,
    request_body,
    told,
)
from miles.errors import EngineError, ServerFault
from miles.types import Completion, Sampling

LOOKS = 6  # at a server's count of tokens, before it is said to hang
ATTEMPTS = 4  # tries of one sample before its call fails


class VllmEngine:
    """Samples from the servers of a fleet; satisfies `miles.protocols.Engine`.

    Each sample is a request of its own, with its own seed, so that where it stands and who answers does not matter. A
    request that fails, or whose server stops making tokens, is sent again to another server from its beginning: a partial
    answer is never a completion. Log-probabilities are the server's own, at the sampling temperature over the whole
    vocabulary. Bits may differ with what else is under way; the tokens' distribution does not.

    Whether a server lives is judged by its count of tokens: one that has work and makes none for `stall_s` seconds is hung.
    """

    def __init__(
        self,
        fleet: Fleet,
        tokenizer: Any,
        *,
        end_token_ids: Sequence[int],
        context: int | None,
        vocabulary: int,
        adapters: bool,
        stall_s: float = 15.0,
        access: Access = NOTHING_TO_SHOW,
        connect: Callable[[str, Access], httpx2.AsyncClient] = async_client,
    ) -> None:
        """`context`: tokens of prompt and completion together. `adapters`: weights are LoRA adapters named by version."""
        self._fleet, self._tokenizer = fleet, tokenizer
        self._end_token_ids = tuple(end_token_ids)
        self._context, self._vocabulary, self._adapters = context, vocabulary, adapters
        self._stall_s, self._access, self._connect = stall_s, access, connect
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links: dict[Server, _Link] = {}

    async def generate(
        self, ids: Sequence[int], n: int, sampling: Sampling, seeds: Sequence[int], min_version: int = 0
    ) -> list[Completion]:
        """n completions of the prompt `ids`, one for each seed; see `miles.protocols.Engine`.

        Raises EngineError for a prompt that is empty or too long, for log-probabilities that are not finite, for weights
        older than `min_version`, and when no server is left.
        """
        check_request(ids, n, sampling, seeds, self._context, self._vocabulary)
        self._begin_loop()
        tasks = [asyncio.ensure_future(self._sample(ids, sampling, seed, min_version)) for seed in seeds]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not any(link.busy for link in self._links.values()):
                await self._close_links()

    async def _sample(self, ids: Sequence[int], sampling: Sampling, seed: int, min_version: int) -> Completion:
        faults: list[str] = []
        while True:
            try:
                server, version = await self._fleet.acquire(ids, min_version)
            except EngineError as error:
                raise EngineError(f"{error} (a prompt of {len(ids)} tokens that begins with {list(ids[:8])})") from None
            failures = server.failures
            try:
                return await self._ask(server, version, ids, sampling, seed, min_version)
            except NotANumber as error:
                raise EngineError(f"{server.name}, version {version}: {error}") from None
            except ServerFault as fault:
                faults.append(f"{server.name}: {fault}")
                if server.failures == failures:  # else: another request has told already
                    self._fleet.fail(server, str(fault), gone=fault.gone)
                if len(faults) >= ATTEMPTS:
                    raise EngineError(
                        f"a prompt of {len(ids)} tokens that begins with {list(ids[:8])} was tried {len(faults)} times: "
                        + "; ".join(faults)
                    ) from fault
            finally:
                self._fleet.release(server, version)

    async def _ask(
        self, server: Server, version: int, ids: Sequence[int], sampling: Sampling, seed: int, min_version: int
    ) -> Completion:
        name = ADAPTER.format(version=version) if self._adapters else None
        body = request_body(ids, sampling, seed, self._end_token_ids, name)
        answer = await self._link(server).post(body)
        if name is not None and answer.get("model") != name:
            raise ServerFault(f"it answered as {answer.get('model')!r} where {name!r} was asked", gone=True)
        whole = parse_answer(answer, version if self._adapters else None)
        if whole.unverified is not None and not await self._fleet.confirmed(server, whole.unverified):
            raise ServerFault(
                f"it sampled with weights of version {whole.unverified}, which were not confirmed", gone=True
            )
        completion = whole.completion
        oldest = min(span.version for span in completion.versions)
        if oldest < max(min_version, version):
            raise ServerFault(f"it sampled with weights of version {oldest} where {version} are expected", gone=True)
        self._check_end(completion, sampling)
        return completion

    def _check_end(self, completion: Completion, sampling: Sampling) -> None:
        """The server's idea of where a completion ends must be the in-process engine's."""
        stopper = Stopper(sampling, self._end_token_ids, self._tokenizer)
        ids = completion.token_ids
        ends = range(len(ids), len(ids) + 1) if not sampling.stop else range(1, len(ids) + 1)
        found = next(((end, reason) for end in ends if (reason := stopper.reason(ids[:end]))), (None, None))
        if found != (len(ids), completion.stop_reason):
            raise EngineError(
                f"a completion of {len(ids)} tokens ended by {completion.stop_reason!r} should have ended after {found[0]} by "
                f"{found[1]!r}: the server decodes text differently (its tokenizer is not this run's)"
            )

    # --- connections, of one event loop at a time --------------------------------------------------------------------

    def _begin_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._links, self._loop = {}, loop  # the old ones ended with their loop

    def _link(self, server: Server) -> _Link:
        if server not in self._links:
            client = self._connect(server.url, self._access)
            self._links[server] = _Link(server, client, self._stall_s)
        return self._links[server]

    async def _close_links(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            await link.close()


class _Link:
    """The connection to one server, and the watch over it while requests are under way."""

    def __init__(self, server: Server, client: httpx2.AsyncClient, stall_s: float) -> None:
        self._server, self._client, self._stall_s = server, client, stall_s
        self._requests: set[asyncio.Task[Any]] = set()
        self._answers = 0
        self._watch: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._client.aclose()

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer's content. Raises ServerFault, also when the server hangs."""
        if not listening(self._server.url):
            raise ServerFault("nobody listens there", gone=True)
        request = asyncio.ensure_future(self._client.post(GENERATE, json=body))
        self._requests.add(request)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._watch_progress())
        watch = self._watch
        try:
            await asyncio.wait({request, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise ServerFault(f"it has work and made no token for {self._stall_s:g} s: it hangs")
            answer = request.result()
        except httpx2.HTTPError as error:
            raise ServerFault(f"the connection failed: {type(error).__name__} {error}", gone=True) from error
        finally:
            request.cancel()
            self._requests.discard(request)
        self._answers += 1
        if answer.status_code != 200:
            refused = f"it refused with status {answer.status_code}: {told(answer.text)}"
            # 404: it has no such adapter, since it was started anew. 409: its port forgot us. Other 4xx: no server would take it.
            if answer.status_code in (404, 409) or answer.status_code >= 500:
                raise ServerFault(refused, gone=True)
            raise EngineError(f"{self._server.name}: {refused}")
        return answer.json()

    async def _watch_progress(self) -> None:
        """Ends when the server has made no token for `stall_s` seconds while requests were under way."""
        pause = self._stall_s / LOOKS
        seen: tuple[float, int] | None = None
        quiet = 0  # looks in a row without progress; not seconds, which pass for a machine that sleeps too
        while quiet < LOOKS:
            await asyncio.sleep(pause)
            progress = await self._progress(pause)
            now = (progress.tokens if progress else (seen[0] if seen else -1.0), self._answers)
            quiet = quiet + 1 if now == seen and self._requests else 0
            seen = now
            if progress is not None:
                self._server.adapt(progress)

    async def _progress(self, timeout_s: float) -> Progress | None:
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                return parse_progress((await self._client.get("/metrics")).text)
        return None
