"""The releases of TRL and transformers that the trainers support."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

# TRL 1.15 is the first release whose trainers use a fused head; those of 1.14 compute on logits.
REQUIRED = {"trl": "1.15", "transformers": "5.17"}


def check_versions() -> None:
    """Reject releases that the trainers do not support.

    Raises:
        ImportError: a package of `REQUIRED` is missing or too old. The message has the package, the version found and
            the version needed.
    """
    for package, oldest in REQUIRED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ImportError(
                f"liger_chunked.integrations.trl needs {package} >= {oldest}, found none: "
                "pip install 'liger_chunked[trl]'"
            ) from None
        from packaging.version import Version  # a dependency of transformers

        if Version(found) < Version(oldest):
            raise ImportError(f"liger_chunked.integrations.trl needs {package} >= {oldest}, found {found}")
