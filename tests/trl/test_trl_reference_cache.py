"""`reference_cache=`: TRL's DPO and KTO read their reference from a file, with the losses of TRL's own reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from liger_chunked import patch_trl
from liger_chunked.integrations.trl import LigerDPOTrainer

KINDS: dict[str, tuple[Any, Any, str]] = {
    "DPO": (DPOTrainer, DPOConfig, "pairs"),
    "KTO": (KTOTrainer, KTOConfig, "unpaired"),
}
SHORT = {
    "per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, "use_cpu": True, "max_length": 16,
    "report_to": "none", "learning_rate": 1e-2, "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip


def make(folder: Path, kind: str, cls: Any = None, config: Any = (), data: Any = None, **kwargs: Any) -> Any:
    trainer, config_cls, column = KINDS[kind]
    args = config_cls(str(folder / "out"), **SHORT, **dict(config))
    kwargs = {"ref_model": tiny.model(seed=1), "processing_class": tiny.tokenizer(), **kwargs}
    return (cls or trainer)(tiny.model(), args=args, train_dataset=data or tiny.dataset(column), **kwargs)


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_the_reference(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, path = losses(make(tmp_path, kind)), tmp_path / "reference.parquet"
    with patch_trl(reference_cache=path):
        assert losses(make(tmp_path, kind, config={"precompute_ref_log_probs": True})) == pytest.approx(
            expected, rel=1e-4
        )
        assert path.exists()
        # A later run reads the file alone.
        monkeypatch.setattr("liger_chunked.integrations.trl.reference_cache.write_cache", None)
        assert losses(make(tmp_path, kind, config={"precompute_ref_log_probs": True})) == pytest.approx(
            expected, rel=1e-4
        )


def test_data_sets_of_evaluations_have_files_of_their_own(tmp_path: Path) -> None:
    config = {"precompute_ref_log_probs": True, "per_device_eval_batch_size": 2}
    data = tiny.dataset("pairs")
    trainer = make(
        tmp_path, "DPO", LigerDPOTrainer, config, eval_dataset=data.select(range(3)),
        reference_cache=tmp_path / "reference.parquet",
    )  # fmt: skip
    plain = make(tmp_path, "DPO", config=config, eval_dataset=data.select(range(3)))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)
    assert {x.name for x in tmp_path.glob("*.parquet")} == {"reference.parquet", "reference-eval.parquet"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ref_model": tiny.model(seed=2)}, "written with model"),
        ({"data": tiny.dataset("pairs").select(range(4))}, "more sequences"),
        ({"data": tiny.dataset("pairs").select([1, 0])}, "another sequence than row 0"),
    ],
    ids=["reference", "fewer", "order"],
)
def test_the_file_of_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    config = {"precompute_ref_log_probs": True}
    with patch_trl(reference_cache=tmp_path / "reference.parquet"):
        make(tmp_path, "DPO", config=config)
        with pytest.raises(ValueError, match=match):
            make(tmp_path, "DPO", config=config, **changes)


def test_what_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'a path such as "reference\.parquet", got 3'):
        patch_trl(reference_cache=3)  # type: ignore[arg-type]
    with patch_trl(reference_cache=tmp_path / "reference.parquet"):
        with pytest.raises(ValueError, match="needs precompute_ref_log_probs=True in the config of DPOTrainer"):
            make(tmp_path, "DPO")
        with pytest.raises(ValueError, match="ld_alpha weighs these"):
            make(tmp_path, "DPO", config={"precompute_ref_log_probs": True, "ld_alpha": 0.5})
        with pytest.raises(ValueError, match="of DPO and KTO: SFTTrainer reads no reference"):
            SFTTrainer(tiny.model(), args=SFTConfig(str(tmp_path / "out"), use_cpu=True, bf16=False))
