"""The app over tiny random models: `streamlit run` starts it for the tests in a browser."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS, TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from conftest import tiny_models  # noqa: E402

from app import main, shared  # noqa: E402
from cag.engine import CAG  # noqa: E402
from cag.settings import Settings  # noqa: E402


def tiny_engine(settings: Settings) -> CAG:
    """An engine whose models need no weights on disk."""
    return CAG(settings, models=tiny_models(settings))


shared.CAG = tiny_engine  # type: ignore[assignment, misc]
main.main()
