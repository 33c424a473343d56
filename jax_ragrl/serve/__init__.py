"""A trained system behind HTTP. Needs the optional dependencies `serve`."""

from jax_ragrl.errors import UserError

try:
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise UserError(
        f"a server needs {error.name}: 'pip install starlette uvicorn prometheus_client', or the "
        "extra 'serve' of this package"
    ) from error
