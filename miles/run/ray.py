"""Where Ray is met, and nowhere else: it joins a cluster, and starts the processes of a run's roles on its nodes.

Ray places and watches. Each process is that of its command, as by hand; samples and weights do not pass through Ray.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from miles.errors import BadInput, in_words
from miles.run.place import STORE
from miles.run.processes import GRACE_S, STOP_S, TAIL, blame, keep_lines, only_loopback
from miles.run.processes import Ended as RankEnded
from miles.run.seat import Order, Seat
from miles.run.starting import Ended, Role

SIDE_BY_SIDE = 4
"""Calls of one actor that run at once: one waits for output, the others are signals."""
LOOK_S = 0.5


@dataclass(frozen=True)
class Standing:
    """Where an actor stands. `port`: one that is free there; `gpus`: those that Ray gives to it."""

    node: str
    ip: str
    port: int
    gpus: tuple[str, ...]
    folder: str  # of the actor's own, there


class Actor(Seat):
    """A seat on the node where Ray has placed it."""

    def standing(self) -> Standing:
        ip = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as listener:
            listener.bind((ip, 0))
            port = listener.getsockname()[1]
        gpus = tuple(str(number) for number in ray.get_gpu_ids())
        return Standing(ray.get_runtime_context().get_node_id(), ip, port, gpus, self.folder)


@dataclass(frozen=True)
class Plan:
    """What the roles of a run have in common."""

    asks: Mapping[str, Mapping[str, float]]  # role (without its number) -> resources of one process, by Ray's names
    near: Mapping[str, tuple[str, bool]]  # role -> the node it stands on, and whether another one will do
    ranks: int  # of the learner
    patience: float  # seconds for the cluster to have room for a role
    folder: str  # that processes are started in
    marks: Mapping[str, Sequence[Path]]  # role -> files in the folders that it shares with the node of the driver
    recipe_word: str
    recipe: str
    logs: Path

    def asked(self, role: str) -> Mapping[str, float]:
        return self.asks[kind_of(role)]


def kind_of(role: str) -> str:
    """`collector` of `collector-3`."""
    return role.partition("-")[0]


@contextmanager
def joined(address: str | None, cpus: int) -> Iterator[str]:
    """Drive the cluster at `address`, or one of this machine's own, which ends with this; the id of the own node.

    `cpus`: what the own one offers. Raises BadInput.
    """
    if ray.is_initialized():
        raise BadInput(
            'run.launcher = "ray" joins a cluster, and this process has joined one: call ray.shutdown() before'
        )
    own: dict[str, Any] = {}
    if address is None:
        own = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "num_cpus": cpus}
    try:
        ray.init(address=address or "local", configure_logging=False, log_to_driver=False, **own)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        what = "a local Ray cannot be started" if address is None else f"run.ray_address = {address} cannot be joined"
        raise BadInput(
            f"{what}: {in_words(error)}. The machine that gives the command must be a node of the cluster (ray start "
            "--address=HOST:PORT), with the same versions of Python and Ray, and the cluster's token"
        ) from error
    try:
        yield ray.get_runtime_context().get_node_id()
    finally:
        ray.shutdown()


def has_gpus() -> bool:
    """Whether a node of the cluster offers GPUs."""
    return ray.cluster_resources().get("GPU", 0) > 0


def find_node(plan: Plan, role: str) -> Standing:
    """The node that a role would get now, and a port that is free there. Raises BadInput where there is none."""
    actors = RoleActors(Role(role, []), plan, plan.patience, lambda _: None)
    try:
        return actors.place()[0]
    finally:
        actors.kill()


class RayStarter:
    """Satisfies `miles.run.starting.Starter`: each role gets actors of its own, each time that it starts."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan, self._say = plan, say
        self._seen: set[str] = set()

    def start(self, role: Role, ended: Callable[[Ended], None]) -> RoleActors:
        # A collector whose node is gone comes back when there is room; the others go on meanwhile.
        waits = role.name in self._seen and kind_of(role.name) == "collector"
        self._seen.add(role.name)
        actors = RoleActors(role, self._plan, None if waits else self._plan.patience, self._say)
        threading.Thread(target=lambda: ended(actors.run()), name=f"ray-{role.name}", daemon=True).start()
        return actors


class RoleActors:
    """The processes of one role: one, or the ranks of a learner, which end together. Satisfies `miles.run.starting.Handle`."""

    def __init__(self, role: Role, plan: Plan, patience: float | None, say: Callable[[str], None]) -> None:
        """`patience` None: waits for room without end."""
        self._role, self._plan, self._patience, self._say = role, plan, patience, say
        self._size = plan.ranks if kind_of(role.name) == "learner" else 1
        self._seats: list[Any] = []
        self._group: PlacementGroup | None = None
        self._asked: int | None = None
        self._ending = threading.Event()

    def run(self) -> Ended:
        """From the search for a place to the end of every process."""
        try:
            standings = self.place()
            self._look_around(standings)
            return self._role_ended(self._until_ended(standings))
        except BadInput as refused:
            return Ended(self._role, 2, (f"miles: {refused}",))
        except RayError as error:
            return Ended(self._role, -(self._asked or signal.SIGKILL), (f"Ray: {in_words(error)}",))
        except Exception as error:  # whoever supervises waits for this end
            return Ended(self._role, 1, (f"Ray: {in_words(error)}",))
        finally:
            self.kill()

    def signal(self, signum: int) -> None:
        """SIGUSR1 is for rank 0. Whoever has no place yet when it is to stop has ended."""
        seats = self._seats
        if signum != signal.SIGUSR1:
            self._asked = signum
        for seat in seats[:1] if signum == signal.SIGUSR1 else seats:
            seat.signal.remote(signum)

    def kill(self) -> None:
        self._ending.set()
        for seat in self._seats:
            with contextlib.suppress(RayError):
                ray.kill(seat)
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)

    def place(self) -> list[Standing]:
        """One actor for each rank, those of a node beside each other. Raises BadInput when no node had room for too long."""
        ask = dict(self._plan.asked(self._role.name))
        options = {"num_cpus": ask.pop("CPU", 0), "num_gpus": ask.pop("GPU", 0), "resources": ask}
        strategies: list[Any] = [None]
        if self._size > 1:
            bundles = [dict(self._plan.asked(self._role.name)) for _ in range(self._size)]
            self._group = placement_group(bundles, strategy="PACK")
            self._wait(self._group.ready())
            strategies = [PlacementGroupSchedulingStrategy(self._group, index) for index in range(self._size)]
        elif self._role.name in self._plan.near:
            node, soft = self._plan.near[self._role.name]
            strategies = [NodeAffinitySchedulingStrategy(node, soft=soft)]
        actor = ray.remote(Actor)
        try:
            self._seats = [
                actor.options(max_concurrency=SIDE_BY_SIDE, scheduling_strategy=strategy, **options).remote()
                for strategy in strategies
            ]
        except ValueError as error:  # Ray knows amounts that some resources cannot be asked for in
            raise BadInput(f"run.resources.{kind_of(self._role.name)}: {in_words(error)}") from error
        found = [self._wait(seat.standing.remote()) for seat in self._seats]
        order = sorted(range(self._size), key=lambda index: found[index].node)
        self._seats = [self._seats[index] for index in order]
        return [found[index] for index in order]

    def _wait(self, answer: Any) -> Any:
        """An actor answers when it has a place."""
        begun, told = time.monotonic(), False
        while True:
            with contextlib.suppress(GetTimeoutError):
                return ray.get(answer, timeout=LOOK_S)
            if self._asked is not None or self._ending.is_set():
                raise RayError("it was to end before it had a place")
            waited = time.monotonic() - begun
            if self._patience is not None and waited > self._patience:
                raise BadInput(self._no_room())
            if self._patience is None and waited > self._plan.patience and not told:
                self._say(f"{self._no_room()} The run goes on, and it starts as soon as there is room.")
                told = True

    def _no_room(self) -> str:
        kind = kind_of(self._role.name)
        ranks = f"{self._size} times " if self._size > 1 else ""
        nodes = "; ".join(f"{node['NodeManagerAddress']} has {shown(node['Resources'])}" for node in _living())
        return (
            f"{self._role.name} asks for {ranks}{shown(self._plan.asked(self._role.name))} (run.resources.{kind}), and for "
            f"{self._plan.patience:g} s no node of the Ray cluster had room for it: {nodes}, part of it in use. Ask for less, or "
            "start nodes that have it (ray start --num-cpus, --num-gpus, --resources)."
        )

    def _look_around(self, standings: Sequence[Standing]) -> None:
        """Raises BadInput where a node does not see the folders that the roles share."""
        marks = [str(mark) for mark in self._plan.marks[kind_of(self._role.name)]]
        for seat, standing in zip(self._seats, standings, strict=True):
            if missing := ray.get(seat.lacks.remote([self._plan.folder, *marks])):
                place = Path(missing[0]).parent if missing[0] in marks else missing[0]
                raise BadInput(
                    f"the node {standing.ip}, where Ray has placed {self._role.name}, does not see the folder {place} of the machine "
                    "that gave the command. Learner and buffer need the run's folder, collectors the one for weights "
                    "(publish.directory, else in the run's folder), and all of them the folder that the command is given in: on a "
                    "disk that their nodes share, at the same path"
                )

    def _until_ended(self, standings: Sequence[Standing]) -> list[RankEnded]:
        """Start every rank and wait for all of them; where one has failed the others have a moment to end by themselves."""
        orders = [self._order(variables) for variables in variables_of(standings)]
        ray.get([seat.start.remote(order) for seat, order in zip(self._seats, orders, strict=True)])
        if self._asked is not None:  # before there was a seat to tell
            self.signal(self._asked)
        ends: queue.SimpleQueue[RankEnded] = queue.SimpleQueue()
        for rank, seat in enumerate(self._seats):
            threading.Thread(target=lambda r=rank, s=seat: ends.put(self._follow(r, s)), daemon=True).start()
        found: list[RankEnded] = []
        left, deadline, killed = self._size, None, False
        while left:
            try:
                end = ends.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                self.kill()
                killed, deadline = True, None
                continue
            left -= 1
            if not killed:
                found.append(end)
            if end.code and deadline is None:
                deadline = time.monotonic() + (GRACE_S if self._asked is None else STOP_S)
        return found

    def _order(self, variables: Mapping[str, str]) -> Order:
        role, plan = self._role, self._plan
        shown = role.shown and variables.get("RANK", "0") == "0"
        return Order(role.command, {**role.environ, **variables}, plan.folder, shown, plan.recipe_word, plan.recipe)

    def _follow(self, rank: int, seat: Any) -> RankEnded:
        """Bring what a process writes to where it belongs, until it ends or its actor does."""
        name = f"{self._role.name}-{rank}" if rank else self._role.name
        lines: deque[str] = deque(maxlen=TAIL)
        log, (reader, writer) = self._plan.logs / f"{name}.log", os.pipe()
        keeping = threading.Thread(target=keep_lines, args=(os.fdopen(reader, "rb"), lines, log), daemon=True)
        keeping.start()
        code: int | None = None
        with os.fdopen(writer, "wb", buffering=0) as kept:
            while code is None:
                try:
                    pieces, code = ray.get(seat.output.remote())
                except RayError as error:
                    pieces, code = [(False, f"Ray: {in_words(error)}\n".encode())], -signal.SIGKILL
                for for_terminal, line in pieces:
                    if for_terminal:
                        print(line.decode(errors="replace"), end="", flush=True)
                    else:
                        kept.write(line)
        keeping.join()
        return RankEnded(rank, code, tuple(lines), log)

    def _role_ended(self, ended: Sequence[RankEnded]) -> Ended:
        failed = [end for end in ended if end.code]
        if not failed:
            return Ended(self._role, 0)
        if self._asked is not None and all(end.code in (-self._asked, 128 + self._asked) for end in failed):
            return Ended(self._role, 128 + self._asked)
        cause = min(failed, key=blame)
        note = (
            [f"This was rank {cause.rank}; its log is {cause.log.name}."] if cause.rank and cause.said is None else []
        )
        return Ended(self._role, cause.code, (*cause.lines, *note))


def variables_of(standings: Sequence[Standing]) -> list[dict[str, str]]:
    """What torchrun would tell each rank. Ranks of one node meet in a file and talk over its loopback device."""
    if len(standings) == 1:
        return [{}]
    nodes = [standing.node for standing in standings]
    first = standings[0]
    if len(set(nodes)) == 1:
        meeting = {STORE: f"{first.folder}/store", **only_loopback()}
    else:
        meeting = {"MASTER_ADDR": first.ip, "MASTER_PORT": str(first.port)}
    found = []
    for rank, node in enumerate(nodes):
        here = [other for other in range(len(nodes)) if nodes[other] == node]
        gpus = ",".join(gpu for other in here for gpu in standings[other].gpus)
        numbers = {
            "RANK": rank, "WORLD_SIZE": len(nodes), "LOCAL_RANK": here.index(rank), "LOCAL_WORLD_SIZE": len(here),
        }  # fmt: skip
        found.append(
            {name: str(number) for name, number in numbers.items()}
            | meeting
            | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        )
    return found


def shown(resources: Mapping[str, float]) -> str:
    """`CPU=4 rollout=1`, without what Ray counts for itself."""
    named = {name: amount for name, amount in resources.items() if ":" not in name and "memory" not in name}
    return " ".join(f"{name}={amount:g}" for name, amount in sorted(named.items())) or "nothing"


def _living() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]
