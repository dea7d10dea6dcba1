"""Which releases of the frameworks the trainers are made for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

# The trainers of TRL 1.15 are the first to ask for a fused head; those of 1.14 compute on logits.
REQUIRED = {"trl": "1.15", "transformers": "5.17"}


def check_versions() -> None:
    """Refuse releases that the trainers were not made for.

    Raises:
        ImportError: a package of `REQUIRED` is missing or too old; the message says which, what was found and what is
            needed.
    """
    for package, oldest in REQUIRED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ImportError(
                f"liger_chunked.integrations.trl needs {package} >= {oldest}, found none: "
                "pip install 'liger_chunked[trl]'"
            ) from None
        from packaging.version import Version  # which transformers brings along

        if Version(found) < Version(oldest):
            raise ImportError(f"liger_chunked.integrations.trl needs {package} >= {oldest}, found {found}")
