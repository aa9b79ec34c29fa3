"""The commands of `miles`: reads the command line, calls one function, and turns errors into a paragraph and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from miles import __version__
from miles.config import tree
from miles.config.text import split_overrides
from miles.errors import BadInput, ConfigError, MilesError
from miles.run import commands
from miles.run.interrupts import Interrupted
from miles.run.threads import prepare_process

INTERRUPTED = 130
OVERRIDES = (
    "Any key of the recipe can be set on the command line: --section.key VALUE, for example --algorithm.steps 6. "
    "docs/recipe.md lists the keys."
)


SERVICE_OPTIONS = ("listen", "token_file", "tls_cert", "tls_key", "insecure")
BUFFER_OPTIONS = ("folder", *SERVICE_OPTIONS, "ledger", "payloads", "single")

Command = Callable[[argparse.Namespace, dict[str, Any]], int]

COMMANDS: Mapping[str, Command] = {
    "train": lambda o, overrides: commands.train(o.recipes, overrides, o.run, o.resume),
    "check": lambda o, overrides: commands.check(o.recipes, overrides),
    "plan": lambda o, overrides: commands.plan(o.recipes, overrides, o.gpus, o.gpu_memory, _machine(o), o.json),
    "buffer": lambda o, _: commands.buffer({name: getattr(o, name) for name in BUFFER_OPTIONS}),
    "learn": lambda o, overrides: commands.learn(o.recipes, overrides, o.run, o.resume),
    "collect": lambda o, overrides: commands.collect(o.recipes, overrides, o.worker),
    "serve": lambda o, overrides: commands.serve(
        o.recipes, overrides, {key: getattr(o, key) for key in SERVICE_OPTIONS}
    ),
    "bench": lambda o, overrides: commands.bench(o.recipes, overrides, {"points": o.points, "to": o.to}),
    "watch": lambda o, _: commands.watch(o.run),
    "report": lambda o, _: commands.report(o.run),
    "export": lambda o, _: commands.export(o.run, o.to, o.merge),
    "eval": lambda o, overrides: commands.evaluate(o.recipes, overrides, o.model),
    "replay": lambda o, _: commands.replay(o.run, o.to),
    "export-samples": lambda o, _: commands.export_samples(o.run, o.format, o.to),
    "doctor": lambda o, overrides: commands.doctor(o.recipes, overrides),
}

MACHINE = {
    "tflops": "TFLOP/s of one GPU in dense bf16 products (default: 989)",
    "mfu": "part of them that training reaches (default: 0.4)",
    "memory_gbps": "GB/s between a GPU and its memory (default: 3350)",
    "link_gbps": "GB/s of one GPU to the others (default: 45)",
}
"""Field of `plan.speed.Machine` -> what its option says."""


def _machine(options: argparse.Namespace) -> dict[str, float]:
    """What was said about the GPUs."""
    return {name: value for name in MACHINE if (value := getattr(options, name)) is not None}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises BadInput and names the nearest option."""

    def own_options(self) -> list[str]:
        return [text for action in self._actions for text in action.option_strings]

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help.")

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        """Raises BadInput for arguments that no option takes."""
        option = next((argument for argument in unknown if argument.startswith("-")), None)
        if option is None:
            raise BadInput(f"Unexpected argument {unknown[0]}. See {self.prog} --help.")
        name = option.partition("=")[0]
        known = [text for text in self.own_options() if text.startswith("--")]
        close = get_close_matches(name, known, n=1, cutoff=0.6)
        spelt = name.lstrip("-").replace("-", "_")
        key = tree.nearest(spelt)
        if key is not None and (spelt in tree.OTHER_WORDS or key.endswith(f".{spelt}") or not close):
            close = [f"--{key}"]
        hint = f"the nearest is {close[0]}" if close else f"there is {', '.join(known)}, and --section.key for recipes"
        raise BadInput(f"Unknown option {name}: {hint}. See {self.prog} --help.")


def main(arguments: Sequence[str] | None = None, table: Mapping[str, Command] = COMMANDS) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 bad input, 3 training aborted, 130 Ctrl-C."""
    prepare_process()
    _have_streams()
    try:
        return _run(sys.argv[1:] if arguments is None else arguments, table)
    except MilesError as error:
        print(_paragraph(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print("miles: interrupted.", file=sys.stderr)
        return interrupt.exit_code if isinstance(interrupt, Interrupted) else INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (`miles check ... | head`) has seen enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"miles: the operating system refused: {error}. Nothing more was written.", file=sys.stderr)
        return 1
    except Exception as error:
        traceback.print_exc()
        print(
            f"miles: {type(error).__name__}: {error}. This is a fault in Miles or in code that it called, not in your recipe; "
            "the lines above show where.",
            file=sys.stderr,
        )
        return 1


def _have_streams() -> None:
    """A process may be started with closed streams; the first files that it opens must not become its output."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _run(arguments: Sequence[str], table: Mapping[str, Command]) -> int:
    overrides, rest = split_overrides(arguments)
    parser, parsers = _parsers()
    _check_command(rest, overrides, parser, parsers)
    options, unknown = parser.parse_known_args(rest)
    if options.command is None:
        parser.print_help()
        return 0
    if unknown:
        parsers[options.command].reject(unknown)
    if overrides and not hasattr(options, "recipes"):
        raise BadInput(f"miles {options.command} takes no recipe, so --{next(iter(overrides))} has no meaning here.")
    return table[options.command](options, overrides)


def _check_command(
    rest: Sequence[str], overrides: Mapping[str, Any], parser: Parser, known: Mapping[str, Parser]
) -> None:
    """Raises BadInput for a first argument that is neither a command nor an option of `miles` itself."""
    first = rest[0] if rest else next((f"--{key}" for key in overrides), None)
    if first is None or first in known or first in parser.own_options():
        return
    if first.startswith("-"):
        raise BadInput(f"{first} comes after a command, as in miles train RECIPE {first} ... See {parser.prog} --help.")
    close = get_close_matches(first, known, n=1)
    hint = f"the nearest is {close[0]}" if close else f"there is {', '.join(known)}"
    raise BadInput(f"There is no command {first}: {hint}. See {parser.prog} --help.")


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="miles",
        allow_abbrev=False,
        description="Reinforcement-learning post-training of language models, from a laptop to a cluster.",
        epilog=f"{OVERRIDES} Start with: miles train recipes/quickstart.toml",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, summary: str, about: str = "") -> Parser:
        return subparsers.add_parser(
            name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}. {about}", allow_abbrev=False
        )

    _add_training(command("train", "train a model as a recipe says", OVERRIDES))
    check = command(
        "check",
        "judge a recipe and show what it resolves to",
        f"Prints every problem at once (exit code 2), or the whole tree, who runs where, and warnings. Loads no model. {OVERRIDES}",
    )
    _add_recipes(check)

    plan = command(
        "plan",
        "memory of each GPU by kind and role, and the time of a step, before a GPU is rented",
        f"Ends with exit code 1 and what to change where it does not fit. Loads no weights. {OVERRIDES}",
    )
    _add_recipes(plan)
    _add_gpus(plan)

    _add_buffer(
        command(
            "buffer",
            "serve the experience buffer to collectors and learners of any machine",
            "Listens on this machine's loopback unless told otherwise, and prints how to join. Another address needs a token "
            "(MILES_BUFFER_TOKEN or --token-file), and TLS or --insecure.",
        )
    )

    _add_training(
        command(
            "learn",
            "learn alone, from what collectors put into the buffer at buffer.url",
            f"New weights go to publish.directory, for the collectors. {OVERRIDES}",
        )
    )
    collect = command(
        "collect",
        "collect alone, for a learner that takes from the buffer at buffer.url",
        f"As many as there are machines; each ends with the run. {OVERRIDES}",
    )
    _add_recipes(collect)
    collect.add_argument("--worker", metavar="NAME", help="name in the ledger (default: machine and process)")
    serve = command(
        "serve",
        "keep the vLLM servers of a recipe for runs of any machine, one run at a time",
        "Listens on this machine's loopback unless told otherwise, and prints how to join. Another address needs a token "
        f"(MILES_ENGINE_TOKEN or --token-file), and TLS or --insecure. {OVERRIDES}",
    )
    _add_recipes(serve)
    _add_service(serve, "127.0.0.1:7080")

    bench = command(
        "bench",
        "measure from which size of a step on vLLM is faster than sampling in process, for engine.kind = auto",
        f"Without a recipe the quickstart's model is taken. {OVERRIDES}",
    )
    bench.add_argument("what", choices=["engine"], metavar="engine", help="what is measured")
    _add_recipes(bench, nargs="*")
    bench.add_argument(
        "--points", default="8x16,64x16,64x64", metavar="SAMPLESxTOKENS,...", help="default: 8x16,64x16,64x64"
    )
    bench.add_argument("--to", type=Path, metavar="FILE", help="default: the user's cache, where auto looks")

    watch = command("watch", "live view of a run in the terminal, also of a finished or dead one")
    _add_run(watch)
    report = command("report", "write RUN/report.html: curves, samples and timings in one file")
    _add_run(report)

    export = command("export", "write a run's newest model as a plain Hugging Face folder")
    _add_run(export)
    export.add_argument("--to", type=_folder, required=True, metavar="DIR", help="folder to write; must not exist yet")
    export.add_argument("--merge", action="store_true", help="merge an adapter into its base model")

    evaluate = command("eval", "held-out score of a model, by the same episodes as in training", OVERRIDES)
    _add_recipes(evaluate)
    evaluate.add_argument(
        "--model", required=True, metavar="DIR", help="model folder, or any name that model.name takes"
    )

    replay = command(
        "replay", "train a run again from its ledger, with no engine; exit code 1 where anything differs by a bit"
    )
    _add_run(replay)
    replay.add_argument("--to", type=Path, metavar="DIR", help="also write the model to this folder")

    samples = command("export-samples", "write every finished group of a run as a table, one row a sample")
    _add_run(samples)
    samples.add_argument("--format", choices=["parquet", "jsonl"], default="parquet", help="default: parquet")
    samples.add_argument("--to", type=Path, metavar="FILE", help="default: RUN/finished.parquet or RUN/finished.jsonl")

    doctor = command(
        "doctor", "check this machine: versions, devices, disk, and engine and learner side by side", OVERRIDES
    )
    _add_recipes(doctor, nargs="*")
    return parser, dict(subparsers.choices)


def _add_training(parser: Parser) -> None:
    _add_recipes(parser)
    parser.add_argument(
        "--run",
        type=_folder,
        metavar="DIR",
        help="folder of the run (default: runs/<recipe>-<time>); must be new, or hold this run with --resume",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run in DIR")


def _add_recipes(parser: Parser, nargs: str = "+") -> None:
    parser.add_argument(
        "recipes", nargs=nargs, type=Path, metavar="RECIPE", help="TOML file; of several, later ones win key by key"
    )


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty name, where a folder is meant (an unset shell variable?)")
    return Path(text)


def _add_gpus(parser: Parser) -> None:
    parser.add_argument("--gpus", type=_positive(int), required=True, metavar="N", help="GPUs of the learner")
    parser.add_argument(
        "--gpu-memory", type=_positive(float), required=True, metavar="GIB", help="memory of one GPU in GiB"
    )
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON, memory in bytes")
    for name, about in MACHINE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_positive(float), metavar="NUMBER", help=about)


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    read.__name__ = kind.__name__
    return read


def _add_buffer(parser: Parser) -> None:
    parser.add_argument(
        "--dir", dest="folder", type=_folder, required=True, metavar="DIR", help="folder of the runs' ledgers"
    )
    parser.add_argument(
        "--single", action="store_true", help="DIR is the folder of one run, whose ledger it holds itself"
    )
    _add_service(parser, "127.0.0.1:7070")
    parser.add_argument(
        "--ledger",
        default="sqlite",
        metavar="URL",
        help="sqlite (default), or postgresql://... for several buffers at once",
    )
    parser.add_argument(
        "--payloads", default="local", metavar="URL", help="local (default), or s3://bucket/prefix for large groups"
    )


def _add_service(parser: Parser, default: str) -> None:
    parser.add_argument("--listen", default=default, metavar="HOST:PORT", help=f"default: {default}; port 0: any")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="tokens that open the service, one a line")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="key of the certificate (PEM)")
    parser.add_argument("--insecure", action="store_true", help="another address than loopback without TLS")


def _add_run(parser: Parser) -> None:
    parser.add_argument("run", type=_folder, metavar="RUN", help="folder of the run, such as runs/quickstart")


def _paragraph(error: MilesError) -> str:
    problems = error.problems if isinstance(error, ConfigError) else []
    if len(problems) > 1:
        return "\n".join([f"miles: {len(problems)} problems:", *(f"  - {problem}" for problem in problems)])
    return f"miles: {error}"


if __name__ == "__main__":
    sys.exit(main())
