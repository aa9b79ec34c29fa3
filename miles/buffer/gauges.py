"""Numbers of a buffer service in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Meters:
    """What the service has counted since it began."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # (route, status)
    bytes_received: int = 0

    def answered(self, route: str, status: int) -> None:
        self.answers[route, status] += 1

    def received(self, size: int) -> None:
        self.bytes_received += size


def exposition(meters: Meters, gauges: Mapping[str, Mapping[str, int]], in_use: int) -> str:
    """The text; `gauges` of each run by its name, `in_use`: bytes of bodies in memory."""
    lines = ["# TYPE miles_buffer_answers_total counter"]
    for (route, status), count in sorted(meters.answers.items()):
        lines.append(f'miles_buffer_answers_total{{route="{route}",status="{status}"}} {count}')
    lines += [
        "# TYPE miles_buffer_group_bytes_received_total counter",
        f"miles_buffer_group_bytes_received_total {meters.bytes_received}",
        "# TYPE miles_buffer_body_bytes gauge",
        f"miles_buffer_body_bytes {in_use}",
    ]
    for name in sorted({name for values in gauges.values() for name in values}):
        lines.append(f"# TYPE miles_buffer_{name} gauge")
        lines += [f'miles_buffer_{name}{{run="{run}"}} {values[name]}' for run, values in sorted(gauges.items())]
    return "\n".join(lines) + "\n"
