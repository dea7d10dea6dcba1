"""Run the Python blocks of a page, in order and in one scope: python examples/run_page.py docs/tutorial.md"""

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    page = Path(sys.argv[1])
    for block in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        lines = page.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * lines + block[1], str(page), "exec"), globals())
