"""`python -m liger_chunked`, see cli.py."""

from liger_chunked.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
