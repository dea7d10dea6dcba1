"""Write the losses and kernels as a repository of the Hugging Face kernel hub: python scripts/hub_kernel.py FOLDER

`kernels.get_kernel` imports a package from a path, under a name of its own, and maybe two versions in one process. So
the copy imports relatively, needs torch alone, and its operators have a namespace of their own. It leaves out the
integrations, `compat` and the shell commands. Triton's kernels run where torch brings Triton; on a CPU, the variant
`torch-cpu` runs the PyTorch code behind the same functions.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import shutil
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "liger_chunked"
VERSION = 1  # of the kernel; a call that would fail with the one before needs a new one (docs/reference/index.md)
BACKENDS = ("cuda", "rocm", "xpu", "cpu")
LEFT_OUT = ("integrations", "compat", "shared_prefix", "cli", "__main__.py")
NAMESPACE = "liger_chunked::"


def sources() -> dict[Path, str]:
    """Return the text of each module, by its path in the package."""
    paths = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return {path: (PACKAGE / path).read_text() for path in paths if path.parts[0] not in LEFT_OUT}


def relative(path: Path, text: str) -> str:
    """Make a module's imports of the package relative.

    >>> relative(Path("engine/choose.py"), "from liger_chunked.types import Head\\nfrom liger_chunked import engine")
    'from ..types import Head\\nfrom .. import engine'
    """
    dots = "." * len(path.parts)
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(name.name.split(".")[0] == "liger_chunked" for name in node.names):
            raise ValueError(f"{path}, line {node.lineno}: only `from liger_chunked... import` can be made relative")
        if (
            isinstance(node, ast.ImportFrom)
            and node.level == 0
            and (node.module or "").split(".")[0] == "liger_chunked"
        ):
            module = (node.module or "").removeprefix("liger_chunked").removeprefix(".")
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"from {node.module} import", f"from {dots}{module} import", 1)
    return "".join(lines)


def write(folder: Path) -> list[Path]:
    """Write the repository and return the folders of its variants, which differ in their metadata alone."""
    texts = {path: relative(path, text) for path, text in sources().items()}
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:12]
    variants = []
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        if variant.exists():
            shutil.rmtree(variant)
        for path, text in texts.items():
            target = variant / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace(NAMESPACE, f"liger_chunked_{backend}_{digest}::"))
        # Older versions of `kernels` look for a folder of the repository's name.
        (variant / "liger_chunked").mkdir()
        (variant / "liger_chunked" / "__init__.py").write_text(_OLD_LAYOUT)
        metadata = {
            "id": f"_liger_chunked_{backend}_{digest}",
            "name": "liger-chunked",
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        variants.append(variant)
    shutil.copy(PACKAGE.parent / "LICENSE", folder / "LICENSE")
    (folder / "README.md").write_text(_CARD)
    return variants


_OLD_LAYOUT = '''"""The package one folder up, for older versions of `kernels`."""

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parent.parent / "__init__.py"
_spec = importlib.util.spec_from_file_location(f"{__name__}_flat", _path)
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)


def __getattr__(name):
    return getattr(_module, name)
'''

_CARD = f"""---
library_name: kernels
license: apache-2.0
tags: [kernels, triton, cross-entropy, post-training]
---

# liger-chunked

Differentiable log-probabilities and entropies of tokens from hidden states and the weight of the `lm_head`. Logits are
computed in tiles, within a budget of bytes. Triton on a GPU, PyTorch elsewhere, in one function:

```python
import torch
from kernels import get_kernel

kernel = get_kernel("<publisher>/liger-chunked", version={VERSION}, trust_remote_code=True)

device = "cuda" if torch.cuda.is_available() else "cpu"
weight = torch.randn(1000, 64, device=device, requires_grad=True)  # (V, H), of lm_head
hidden = torch.randn(2, 16, 64, device=device, requires_grad=True)  # (B, T, H)
target = torch.randint(1000, (2, 16), device=device)  # target[t] is the token that hidden[t] predicts; -100: none
stats = kernel.linear_token_stats(weight, hidden, target, outputs=("logps", "entropy"))
loss = -(stats.logps + 0.01 * stats.entropy).mean()
loss.backward()
```

`softcap`, `logit_scale`, `temperature` and `logits_budget` are keywords. `fused_lm_head` has the names of TRL's fused
head. The stock loss of a transformers model runs without all logits after `kernel.defer_logits(model.lm_head)`. The
losses are here too:

```python
loss, metrics = kernel.LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=False)(weight, hidden, target)
loss.backward()
```

Rounding errors are at most 1.1 times those of PyTorch on full logits. The kernels run and are measured on H100 and
H200; those for A100, Ada, Blackwell and MI300X are compiled and have not run, and `torch-xpu` has been neither compiled
nor run.
"""

if __name__ == "__main__":
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("folder", type=Path)
    folder = parse.parse_args().folder
    for variant in write(folder):
        print(f"wrote {variant}")
    print(f"hf upload <publisher>/liger-chunked {folder} . --repo-type kernel --revision v{VERSION}")
