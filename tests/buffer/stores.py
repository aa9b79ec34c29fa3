"""Which tests make up the contract of a ledger's store: they run on every one."""

import pytest

EVERY_STORE = pytest.mark.parametrize(
    "where", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True
)
