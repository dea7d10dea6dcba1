"""Shell commands: what runs here, how much memory a loss takes, which models are served, how fast it is."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

import liger_chunked as library
from liger_chunked.kernels.backend import WIDE_TILES, use_triton
from liger_chunked.memory import Loss

LOSSES: dict[str, Callable[[], Loss]] = {
    "cross-entropy": library.LigerFusedLinearCrossEntropyLoss,
    "dpo": library.LigerFusedLinearDPOLoss,
    "orpo": library.LigerFusedLinearORPOLoss,
    "cpo": library.LigerFusedLinearCPOLoss,
    "simpo": library.LigerFusedLinearSimPOLoss,
    "kto": library.LigerFusedLinearKTOLoss,
    "bco": library.LigerFusedLinearBCOLoss,
    "grpo": library.LigerFusedLinearGRPOLoss,
    "kl": library.LigerFusedLinearKLDivLoss,
    "jsd": library.LigerFusedLinearJSDLoss,
    "tvd": library.LigerFusedLinearTVDLoss,
    "cosine": library.LigerFusedLinearCosineSimilarityLoss,
    "token-stats": lambda: library.linear_token_stats,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INTEGRATIONS = ("transformers", "trl", "peft", "accelerate")
REPOSITORY = Path(__file__).parent.parent


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device() -> tuple[torch.device, str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu"), "cpu"
    if accelerator.type != "cuda":
        return accelerator, str(accelerator)
    properties = torch.cuda.get_device_properties(accelerator)
    return accelerator, f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def env() -> dict[str, str]:
    """Return versions, the device, the kernels that run on it, and the installed frameworks.

    `wide_tiles` lists the major compute capabilities that use the fused epilogue (`LIGER_CHUNKED_WIDE_TILES`).
    """
    device, name = _device()
    return {
        "liger_chunked": library.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "device": name,
        "kernels": "Triton" if use_triton(torch.empty(0, device=device)) else "torch",
        "wide_tiles": ", ".join(map(str, WIDE_TILES)) or "none",
        **{package: _version(package) for package in INTEGRATIONS},
    }


def _env(args: argparse.Namespace) -> int:
    for name, value in env().items():
        print(f"{name:14s} {value}")
    return 0


def _memory(args: argparse.Namespace) -> int:
    estimate = library.estimate_memory(
        LOSSES[args.loss](),
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        shape=args.shape,
        valid=args.valid[0] if args.valid and len(args.valid) == 1 else args.valid,
        dtype=DTYPES[args.dtype],
        autocast=None if args.autocast is None else DTYPES[args.autocast],
        bias=args.bias,
        trainable_head=not args.frozen_head,
        trainable_input=not args.frozen_input,
        ref_hidden_size=args.ref_hidden_size,
        teacher_hidden_size=args.teacher_hidden_size,
        teacher_top_k=args.teacher_top_k,
        logits_budget=args.logits_budget,
        capability=None if args.capability is None else tuple(args.capability),
    )
    print(estimate)
    return 0


def _models(args: argparse.Namespace) -> int:
    if find_spec("transformers") is None:
        raise ValueError("models needs transformers: pip install 'liger_chunked[transformers]'")
    survey = import_module("liger_chunked.integrations.transformers.survey")
    names = survey.class_names(args.classes)
    for line in [survey.page(names)] if args.markdown else survey.lines(names):
        print(line, flush=True)
    return 0


def _bench(args: argparse.Namespace) -> int:
    modules = (REPOSITORY / "benchmarks").glob("*.py")
    there = sorted(path.stem for path in modules if '__name__ == "__main__"' in path.read_text())
    if args.family not in there:
        raise ValueError(
            f"no benchmark {args.family!r} in {REPOSITORY}, expected "
            + (f"one of {there}" if there else "a clone of the repository: there, `make bench` runs all")
        )
    return subprocess.call([sys.executable, "-m", f"benchmarks.{args.family}", *args.arguments], cwd=REPOSITORY)


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser("liger-chunked", description=__doc__.split("\n")[0])
    parse.add_argument("--version", action="version", version=library.__version__)
    commands = parse.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("env", help="versions, device, kernels, frameworks")
    command.set_defaults(run=_env)

    command = commands.add_parser("memory", help="peak memory of a forward and backward above its inputs")
    command.set_defaults(run=_memory)
    command.add_argument(
        "loss", choices=LOSSES, help="with its default options; a distillation loss also needs a teacher option"
    )
    command.add_argument("--vocab-size", type=int, required=True)
    command.add_argument("--hidden-size", type=int, required=True)
    command.add_argument("--shape", type=int, nargs="+", required=True, help="of the target: B T, or N")
    command.add_argument("--valid", type=int, nargs="+", help="tokens with a target: in total, or per sequence")
    command.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weight and hidden states")
    command.add_argument("--autocast", choices=DTYPES, help="the dtype of torch.autocast")
    command.add_argument("--bias", action="store_true", help="the head has a bias")
    command.add_argument("--frozen-head", action="store_true", help="as under PEFT")
    command.add_argument("--frozen-input", action="store_true", help="hidden states need no gradient")
    command.add_argument("--ref-hidden-size", type=int, help="a reference given as hidden states")
    command.add_argument("--teacher-hidden-size", type=int, help="a teacher given as hidden states")
    command.add_argument("--teacher-top-k", type=int, help="a teacher given as log-probabilities")
    command.add_argument("--logits-budget", help="bytes, or with a unit: 256MiB, 1GB; default: automatic")
    command.add_argument("--capability", type=int, nargs=2, help="of the GPU: 9 0 is Hopper; default: this machine's")

    command = commands.add_parser("models", help="heads and layers that are served of each class of transformers")
    command.set_defaults(run=_models)
    command.add_argument("classes", nargs="*", help="names, or patterns such as 'Qwen*'; default: all")
    command.add_argument("--markdown", action="store_true", help="as the page docs/supported-models.md")

    command = commands.add_parser("bench", help="run a benchmark of the repository")
    command.set_defaults(run=_bench)
    command.add_argument("family", help="cross_entropy, preference, distillation, policy, ...")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the benchmark, --help too")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a ValueError ends the program with its message and status 2."""
    parse = parser()
    args = parse.parse_args(arguments)
    try:
        return args.run(args)
    except ValueError as error:
        parse.error(str(error))
