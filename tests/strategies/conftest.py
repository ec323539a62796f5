"""Tests that read what real DeepSpeed runs left are marked for `.ci/run`."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "zero" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)
