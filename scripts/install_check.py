"""Install the wheel and the sdist in clean environments, for several Pythons and extras, and use the library there.

python scripts/install_check.py FOLDER                                       this Python
python scripts/install_check.py FOLDER --python python3.10 python3.13        others
python scripts/install_check.py FOLDER --torch torch==2.13.0                 this torch
python scripts/install_check.py FOLDER --python python3.13 --resolve         without torch: see below

An environment per Python and extra gets what pip chooses, and runs forward and backward of losses; with
`transformers`, a patched model; with `trl`, a step of a trainer; with `cli`, the commands. On Linux, PyPI's torch
brings gigabytes of CUDA packages along: for a CPU build, set pip's index or `PIP_FIND_LINKS`, and `--torch`.
`--resolve` installs the wheel alone, compiles its files, imports the package, and lets pip choose all versions without
installing them: it shows that a Python is allowed and that versions exist, not that they work.

FOLDER keeps the archives, the environments' logs, and `summary.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("", "transformers", "trl", "cli")
SHOWN = ("torch", "triton", "transformers", "trl")

LOSSES = """
import torch, liger_chunked
from liger_chunked import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss
from liger_chunked.testing import check_loss
w, x = torch.randn(64, 16, requires_grad=True), torch.randn(4, 8, 16, requires_grad=True)
t = torch.randint(64, (4, 8))
ref = -torch.rand(4, 8)
for loss, given in (
    (LigerFusedLinearCrossEntropyLoss(), {}),
    (LigerFusedLinearDPOLoss(), {"ref_logps": ref}),
    (LigerFusedLinearGRPOLoss(), {"advantages": torch.randn(4)}),
):
    value = loss(w, x, t, **given)
    (value[0] if isinstance(value, tuple) else value).backward()
    assert w.grad.isfinite().all() and x.grad.abs().sum() > 0
    assert check_loss(loss).error < 1e-9
"""
MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from liger_chunked import apply_liger_kernel
config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2)
torch.manual_seed(0)
model = LlamaForCausalLM(config)
ids = torch.randint(99, (2, 9))
expected = model(input_ids=ids, labels=ids).loss
applied = str(apply_liger_kernel(model))
output = model(input_ids=ids, labels=ids)
output.loss.backward()
assert not output.logits.is_computed, applied
assert abs(output.loss.item() - expected.item()) < 1e-4
assert all(p.grad.isfinite().all() for p in model.parameters())
"""
TRAINER = """
import tempfile
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig
from liger_chunked.integrations.trl import LigerDPOTrainer
words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", "a", "b", "c", "d"])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
config = LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1)
data = Dataset.from_list([{"prompt": "a b", "chosen": "c d", "rejected": "d d"}] * 4)
with tempfile.TemporaryDirectory() as folder:
    args = DPOConfig(output_dir=folder, max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
                     bf16=False, save_strategy="no")
    trainer = LigerDPOTrainer(
        model=LlamaForCausalLM(config), ref_model=LlamaForCausalLM(config), args=args, train_dataset=data,
        processing_class=tokenizer)
    assert trainer.train().training_loss > 0
"""
USES = {"": [LOSSES], "transformers": [LOSSES, MODEL], "trl": [LOSSES, MODEL, TRAINER], "cli": [LOSSES]}
COMMANDS = (["env"], ["memory", "dpo", "--vocab-size", "1024", "--hidden-size", "64", "--shape", "4x32"], ["check"])


@dataclass
class Result:
    python: str
    archive: str
    extra: str
    checked: str
    outcome: str
    versions: str
    seconds: float

    def row(self) -> str:
        extra = f"`[{self.extra}]`" if self.extra else "torch alone"
        cells = (self.python, self.archive, extra, self.versions, self.checked, self.outcome, f"{self.seconds:.0f} s")
        return f"| {' | '.join(cells)} |"


HEADER = "| Python | from | extra | versions | checked | result | time |\n|---|---|---|---|---|---|---|"


class Failed(Exception):
    """The first line says which step failed."""


def run(command: list[str], log: Path, cwd: Path) -> str:
    """Run a command outside of the repository, and return its output; append both to the log."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)[:2000]}\n{done.stdout}{done.stderr}\n")
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise Failed(f"failed: {last[0][:200]}")
    return done.stdout


def build(folder: Path) -> dict[str, Path]:
    """Build sdist, and the wheel from the sdist, and check what they hold."""
    log, dist = folder / "build.log", folder / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    environment = venv(Path(sys.executable), folder / "env-build", log)
    pip(environment, log, folder, "install", "build")
    run([str(environment), "-m", "build", "--outdir", str(dist), str(ROOT)], log, folder)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    files = git("ls-files", "liger_chunked").split()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    if missing := sorted(set(files) - names):
        raise Failed(f"failed: the wheel lacks {missing[:5]}")
    if surplus := sorted(name for name in names if not name.startswith("liger_chunked")):
        raise Failed(f"failed: the wheel has {surplus[:5]}")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    if missing := sorted({*files, "README.md", "LICENSE", "pyproject.toml"} - inside):
        raise Failed(f"failed: the sdist lacks {missing[:5]}")
    return {"wheel": wheel, "sdist": sdist}


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def venv(python: Path, folder: Path, log: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    run([str(python), "-m", "venv", str(folder)], log, log.parent)
    made = folder / "bin" / "python"
    pip(made, log, log.parent, "install", "--upgrade", "pip")
    return made


def pip(python: Path, log: Path, cwd: Path, *arguments: str) -> str:
    return run([str(python), "-m", "pip", "--disable-pip-version-check", *arguments], log, cwd)


def requirement(archive: Path, extra: str) -> str:
    return f"liger_chunked{f'[{extra}]' if extra else ''} @ {archive.resolve().as_uri()}"


def installed(python: Path, log: Path, cwd: Path) -> str:
    found = {p["name"]: p["version"] for p in json.loads(pip(python, log, cwd, "list", "--format", "json"))}
    return _shown(found)


def _shown(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)


def use(python: Path, archive: Path, extra: str, log: Path, cwd: Path, torch: str | None) -> tuple[str, str]:
    """Install and use; return what was checked, and the versions."""
    # One call: pip may not replace a torch that is asked for.
    pip(python, log, cwd, "install", requirement(archive, extra), *([] if torch is None else [torch]))
    pip(python, log, cwd, "check")
    for code in USES[extra]:
        run([str(python), "-W", "error::SyntaxWarning", "-c", code], log, cwd)
    checked = {"": "losses", "transformers": "losses, patched model", "trl": "losses, patched model, DPO trainer",
               "cli": "losses, `env`, `memory`, `check`"}  # fmt: skip
    if extra == "cli":
        for arguments in COMMANDS:
            run([str(python.parent / "liger-chunked"), *arguments], log, cwd)
    return checked[extra], installed(python, log, cwd)


def resolve(python: Path, archive: Path, extra: str, log: Path, cwd: Path, torch: str | None) -> tuple[str, str]:
    """Install the archive alone, and let pip choose the rest."""
    pip(python, log, cwd, "install", "--no-deps", str(archive))
    run([str(python), "-c", "import liger_chunked; assert 'linear_token_stats' in dir(liger_chunked)"], log, cwd)
    package = run([str(python), "-c", "import liger_chunked; print(liger_chunked.__path__[0])"], log, cwd).strip()
    run([str(python), "-W", "error", "-m", "compileall", "-q", "-f", package], log, cwd)
    report = log.with_suffix(".json")
    pip(python, log, cwd, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report),
        requirement(archive, extra), *([] if torch is None else [torch]))  # fmt: skip
    chosen = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return "resolved, compiled, imported; not run", _shown({m["name"].lower(): m["version"] for m in chosen})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters; default: this one")
    parser.add_argument("--extra", nargs="+", choices=["torch", *EXTRAS[1:]], help="default: torch alone and all")
    parser.add_argument("--torch", help="the torch to install, such as torch==2.13.0")
    parser.add_argument("--resolve", action="store_true", help="do not install torch")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()
    archives = build(folder)
    extras = EXTRAS if args.extra is None else ["" if extra == "torch" else extra for extra in args.extra]
    # The sdist is built once more, with torch alone.
    cases = [("wheel", extra) for extra in extras] + [("sdist", "")] * ("" in extras)
    results = []
    for interpreter in args.python:
        path = shutil.which(interpreter)
        if path is None:
            parser.error(f"--python {interpreter}: no such interpreter")
        version = run([path, "-c", "import platform; print(platform.python_version())"], folder / "build.log", folder)
        version = version.strip()
        for kind, extra in cases:
            name = f"{version}-{kind}-{extra or 'torch'}" + ("-resolved" if args.resolve else "")
            log, environment = folder / f"{name}.log", folder / f"env-{name}"
            log.unlink(missing_ok=True)
            begin, checked, versions, outcome = time.monotonic(), "", "", "passed"
            try:
                python = venv(Path(path), environment, log)
                checked, versions = (resolve if args.resolve else use)(
                    python, archives[kind], extra, log, folder, args.torch
                )
            except Failed as failure:
                outcome = str(failure)
            results.append(Result(version, kind, extra, checked, outcome, versions, time.monotonic() - begin))
            print(results[-1].row(), flush=True)
            if not args.keep:
                shutil.rmtree(environment, ignore_errors=True)
    rows = [HEADER, *(result.row() for result in results)]
    summary = folder / ("summary-resolved.md" if args.resolve else "summary.md")
    summary.write_text("\n".join(rows) + "\n")
    return any(result.outcome != "passed" for result in results)


if __name__ == "__main__":
    sys.exit(main())
