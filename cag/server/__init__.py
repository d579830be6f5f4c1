"""``cag serve``: an OpenAI-compatible server over `cag.engine.CAG`."""

from __future__ import annotations

from cag.errors import CagError

try:
    import fastapi  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise CagError(
        f"the server needs '{error.name}', which is not here; run `pip install 'cag[server]'`"
    ) from error

from cag.server.app import Limits, create_app
from cag.server.run import background, serve

__all__ = ["Limits", "background", "create_app", "serve"]
