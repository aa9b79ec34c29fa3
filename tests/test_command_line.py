"""The command line: exit codes, one-paragraph errors, the nearest option."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from miles import __version__
from miles.__main__ import main

GOOD = ["--model.name", "tiny-random:llama", "--data.source", "task:addition"]

FIVE_MISTAKES = """
[model]
name = "no/such/folder"
[data]
source = "missing.jsonl"
[algorithm]
steps = "many"
[rollout]
group_sise = 8
group_size = 1
"""


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(arguments) == code
    return capsys.readouterr().err


def test_five_mistakes_are_five_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(FIVE_MISTAKES, encoding="utf-8")
    lines = fails(capsys, "check", str(path)).splitlines()
    assert lines[0] == "miles: 5 problems:"
    assert len(lines) == 6
    assert all(line.startswith("  - ") for line in lines[1:])


def test_check_with_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.toml"
    path.touch()
    assert main(["check", str(path), *GOOD, "--algorithm.steps=3", "--rollout.group-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert "steps = 3 " in shown
    assert "group_size = 2 " in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("check x.toml --rum y", "Unknown option --rum: there is --help, and --section.key for recipes."),
        ("train x.toml --rum y", "Unknown option --rum: the nearest is --run."),
        ("train x.toml --res", "Unknown option --res: the nearest is --resume."),
        ("train x.toml --group-size 3", "Unknown option --group-size: the nearest is --rollout.group_size."),
        ("train x.toml --lr=3", "Unknown option --lr: the nearest is --learner.learning_rate."),
        ("report x --zzzzzz", "Unknown option --zzzzzz: there is --help, and"),
        ("report x y", "Unexpected argument y. See miles report --help."),
        ("check", "The following arguments are required: RECIPE. See miles check --help."),
        ("export x", "The following arguments are required: --to."),
        ("chek x", "There is no command chek: the nearest is check. See miles --help."),
        ("zzz", "There is no command zzz: there is train, check,"),
        ("--run x", "--run comes after a command, as in miles train RECIPE --run ... See miles --help."),
        ("--algorithm.steps 3", "--algorithm.steps comes after a command, as in miles train RECIPE --algorithm.steps"),
        ("check x.toml --algorithm.steps", "--algorithm.steps (command line) needs a value: an integer >= 1"),
        ("watch x --algorithm.steps 3", "miles watch takes no recipe, so --algorithm.steps has no meaning here."),
        ("check no_such.toml", "no_such.toml does not exist"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: str, words: str) -> None:
    assert words in fails(capsys, *arguments.split())


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "train" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"miles {__version__}\n"


@pytest.mark.parametrize("command", ["train", "check", "watch", "report", "export", "eval", "doctor"])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    assert f"usage: miles {command}" in capsys.readouterr().out


def test_environment_variables_count(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES__ALGORITHM__STEPS", "many")
    assert "(environment MILES__ALGORITHM__STEPS)" in fails(capsys, "check", "no_such.toml")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "miles: interrupted."),
        (OSError(28, "No space left on device", "runs/x/ledger.sqlite"), 1, "No space left on device: 'runs/x/ledger"),
        (ZeroDivisionError("division by zero"), 1, "miles: ZeroDivisionError: division by zero."),
    ],
)
def test_other_failures_end_with_a_paragraph_too(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    def broken(_options: object, _overrides: Mapping[str, object]) -> int:
        raise error

    assert main(["watch", "x"], {"watch": broken}) == code
    assert words in capsys.readouterr().err
