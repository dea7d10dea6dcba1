"""`python -m liger_chunked`."""

from liger_chunked.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
