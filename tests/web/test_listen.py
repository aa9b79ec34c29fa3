from __future__ import annotations

from pathlib import Path

import pytest

from miles.errors import BadInput
from miles.web.listen import read_tokens

NAME = "MILES_SOME_TOKEN"
TOKEN = "0123456789abcdef0123"


def test_tokens_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    assert read_tokens(None, {}, NAME) == []
    assert read_tokens(None, {NAME: TOKEN}, NAME) == [TOKEN]
    file.write_text(f"{TOKEN}\n\n{TOKEN}2\n")
    assert read_tokens(file, {NAME: "ignored-ignored-ignored"}, NAME) == [TOKEN, TOKEN + "2"]
    for content, message in (("", "holds no token"), ("short\n", "shorter than 16"), ("ä" * 20, "not plain ASCII")):
        file.write_text(content)
        with pytest.raises(BadInput, match=message) as error:
            read_tokens(file, {}, NAME)
        assert "ä" not in str(error.value)
        assert "short\n" not in str(error.value)
    with pytest.raises(BadInput, match="cannot be read"):
        read_tokens(tmp_path / "none", {}, NAME)
