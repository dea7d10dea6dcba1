from __future__ import annotations

from dataclasses import dataclass, field

from liger_chunked.what_ran import APPLIED as APPLIED

FUSED = "fused_linear_cross_entropy"


@dataclass
class Applied:
    """What `apply_liger_kernel` did to a model; `print` shows it.

    - `family`: the model type, such as "llama"
    - `replaced`: for each switch that is on, the names of patched classes or functions, and how many modules have them
    - `left`: for each class or function that is left alone, the reason
    - `ropes`: the modules and names of the rotary functions that the model's own layers do not call any more
    - `everywhere`: the replaced classes whose layer runs where no kernel does too, as those of `register_layer`
    """

    family: str
    replaced: dict[str, dict[str, int]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    ropes: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    everywhere: set[str] = field(default_factory=set, init=False, repr=False)

    def count(self, switch: str, name: str) -> None:
        counts = self.replaced.setdefault(switch, {})
        counts[name] = counts.get(name, 0) + 1

    def __str__(self) -> str:
        lines = [
            f"  {switch}: " + ", ".join(f"{name} x {n}" if n > 1 else name for name, n in counts.items())
            for switch, counts in self.replaced.items()
        ]
        left = ["Left alone:", *(f"  {name}: {reason}" for name, reason in self.left.items())] if self.left else []
        return "\n".join([f"Patched in {self.family}:", *lines, *left])
