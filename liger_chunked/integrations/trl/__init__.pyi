"""What type checkers and editors see of this package, whose trainers are made on first use.

Arguments are those of TRL 1.16's trainers, then ours. tests/api/test_typing.py compares them with the real ones.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers.feature_extraction_utils import FeatureExtractionMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import ProcessorMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction
from transformers.training_args import TrainingArguments
from transformers.utils.quantization_config import BitsAndBytesConfig
from trl.experimental.cpo.cpo_config import CPOConfig
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd.gkd_config import GKDConfig
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.gold.gold_config import GOLDConfig
from trl.experimental.gold.gold_trainer import GOLDTrainer
from trl.experimental.online_dpo.online_dpo_config import OnlineDPOConfig
from trl.experimental.online_dpo.online_dpo_trainer import OnlineDPOTrainer
from trl.experimental.orpo.orpo_config import ORPOConfig
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from liger_chunked.losses import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)

__all__ = [
    "LigerCPOTrainer",
    "LigerDPOTrainer",
    "LigerDistillationTrainer",
    "LigerGKDTrainer",
    "LigerGOLDTrainer",
    "LigerGRPOTrainer",
    "LigerKTOTrainer",
    "LigerORPOTrainer",
    "LigerOnlineDPOTrainer",
    "LigerRLOOTrainer",
    "LigerSFTTrainer",
    "add_chunked_lm_head",
    "chunked_heads",
]

REQUIRED: dict[str, str]

def check_versions() -> None: ...
def add_chunked_lm_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    *,
    logits_budget: int | float | str | None = None,
    share_prefix: bool | str = False,
) -> None: ...
def chunked_heads(
    *, logits_budget: int | float | str | None = None, share_prefix: bool | str = False
) -> AbstractContextManager[None]: ...

_Model: TypeAlias = str | PreTrainedModel | PeftModel
_AnyModel: TypeAlias = PreTrainedModel | nn.Module | str
_Data: TypeAlias = Dataset | IterableDataset
_EvalData: TypeAlias = (
    Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset]
)
_Collator: TypeAlias = Callable[[list[Any]], dict[str, Any]]
_Processing: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
_AnyProcessing: TypeAlias = PreTrainedTokenizerBase | BaseImageProcessor | FeatureExtractionMixin | ProcessorMixin
_Metrics: TypeAlias = Callable[[EvalPrediction], dict[str, Any]]
_Optimizers: TypeAlias = tuple[Optimizer | None, LambdaLR | None]
_Preprocess: TypeAlias = Callable[[Tensor, Tensor], Tensor]
_Reward: TypeAlias = str | PreTrainedModel | Callable[..., list[float | None]] | Callable[..., list[float]]
_Rewards: TypeAlias = _Reward | list[_Reward]
_RewardProcessing: TypeAlias = PreTrainedTokenizerBase | list[PreTrainedTokenizerBase]
_Environment: TypeAlias = Callable[[], Any]  # an object with `reset(**kwargs) -> str | None`
_Budget: TypeAlias = int | float | str | None
_Share: TypeAlias = bool | Literal["auto"]

class LigerSFTTrainer(SFTTrainer):
    """TRL's `SFTTrainer` without logits, see docs/trainers.md. `loss` replaces TRL's loss.

    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _Model,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: _Collator | None = None,
        train_dataset: _Data | None = None,
        eval_dataset: _EvalData | None = None,
        processing_class: _Processing | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: _Metrics | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: _Preprocess | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
        *,
        loss: LigerFusedLinearCrossEntropyLoss | None = None,
        logits_budget: _Budget = None,
    ) -> None: ...

class LigerDPOTrainer(DPOTrainer):
    """TRL's `DPOTrainer` without logits, see docs/trainers.md. `loss` replaces TRL's loss.

    `share_prefix` computes a prompt once for its sequences, see docs/shared_prefix.md.
    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _Model,
        ref_model: PreTrainedModel | None = None,
        args: DPOConfig | None = None,
        data_collator: _Collator | None = None,
        train_dataset: _Data | None = None,
        eval_dataset: _EvalData | None = None,
        processing_class: _Processing | None = None,
        compute_metrics: _Metrics | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        *,
        share_prefix: _Share = "auto",
        loss: LigerFusedLinearPreferenceBase | None = None,
        logits_budget: _Budget = None,
    ) -> None: ...

class LigerKTOTrainer(KTOTrainer):
    """TRL's `KTOTrainer` without logits, see docs/trainers.md. `loss` replaces TRL's loss.

    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _Model,
        ref_model: PreTrainedModel | None = None,
        args: KTOConfig | None = None,
        data_collator: _Collator | None = None,
        train_dataset: _Data | None = None,
        eval_dataset: _EvalData | None = None,
        processing_class: _Processing | None = None,
        compute_metrics: _Metrics | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        *,
        loss: LigerFusedLinearUnpairedPreferenceBase | None = None,
        logits_budget: _Budget = None,
    ) -> None: ...

class LigerORPOTrainer(ORPOTrainer):
    """TRL's `ORPOTrainer` without logits, see docs/trainers.md. `loss` replaces TRL's loss.

    `share_prefix` computes a prompt once for its sequences, see docs/shared_prefix.md.
    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _AnyModel | None = None,
        args: ORPOConfig | None = None,
        data_collator: _Collator | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: _AnyProcessing | None = None,
        model_init: Callable[[], PreTrainedModel] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        preprocess_logits_for_metrics: _Preprocess | None = None,
        peft_config: PeftConfig | None = None,
        compute_metrics: Callable[[EvalLoopOutput], dict[str, Any]] | None = None,
        *,
        share_prefix: _Share = "auto",
        loss: LigerFusedLinearPreferenceBase | None = None,
        logits_budget: _Budget = None,
    ) -> None: ...

class LigerCPOTrainer(CPOTrainer):
    """TRL's `CPOTrainer` without logits, see docs/trainers.md. `loss` replaces TRL's loss.

    `share_prefix` computes a prompt once for its sequences, see docs/shared_prefix.md.
    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _AnyModel | None = None,
        args: CPOConfig | None = None,
        data_collator: _Collator | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: _AnyProcessing | None = None,
        model_init: Callable[[], PreTrainedModel] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        preprocess_logits_for_metrics: _Preprocess | None = None,
        peft_config: PeftConfig | None = None,
        compute_metrics: Callable[[EvalLoopOutput], dict[str, Any]] | None = None,
        *,
        share_prefix: _Share = "auto",
        loss: LigerFusedLinearPreferenceBase | None = None,
        logits_budget: _Budget = None,
    ) -> None: ...

class LigerOnlineDPOTrainer(OnlineDPOTrainer):
    """TRL's `OnlineDPOTrainer` without logits, see docs/trainers.md. It takes no `loss`: any but None raises TypeError.

    `share_prefix` computes a prompt once for its sequences, see docs/shared_prefix.md.
    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _AnyModel,
        ref_model: PreTrainedModel | nn.Module | None = None,
        reward_funcs: _Rewards | None = None,
        args: OnlineDPOConfig | None = None,
        data_collator: _Collator | None = None,
        train_dataset: Dataset | TorchIterableDataset[Any] | None = None,
        eval_dataset: Dataset
        | TorchIterableDataset[Any]
        | dict[str, Dataset | TorchIterableDataset[Any]]
        | None = None,
        processing_class: _Processing | None = None,
        reward_processing_classes: _RewardProcessing | None = None,
        peft_config: PeftConfig | None = None,
        compute_metrics: _Metrics | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        preprocess_logits_for_metrics: _Preprocess | None = None,
        *,
        share_prefix: _Share = "auto",
        loss: None = None,
        logits_budget: _Budget = None,
    ) -> None: ...

class LigerGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` without logits, see docs/trainers.md. `loss` replaces TRL's loss.

    `share_prefix` computes a prompt once for its sequences, see docs/shared_prefix.md.
    `kept_ids` trains on the softmax over what the sampler kept; `skip_zero_advantage` leaves out sequences without a
    gradient.
    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _Model,
        reward_funcs: _Rewards | None = None,
        args: GRPOConfig | None = None,
        train_dataset: _Data | None = None,
        eval_dataset: _EvalData | None = None,
        processing_class: _Processing | None = None,
        reward_processing_classes: _RewardProcessing | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[[list[str], GRPOTrainer], dict[str, Any]] | None = None,
        environment_factory: _Environment | dict[str, _Environment] | None = None,
        *,
        share_prefix: _Share = "auto",
        kept_ids: bool = False,
        skip_zero_advantage: _Share = "auto",
        loss: LigerFusedLinearPolicyBase | None = None,
        logits_budget: _Budget = None,
    ) -> None: ...

class LigerRLOOTrainer(RLOOTrainer):
    """TRL's `RLOOTrainer` without logits, see docs/trainers.md. It takes no `loss`: any but None raises TypeError.

    `share_prefix` computes a prompt once for its sequences, see docs/shared_prefix.md.
    `kept_ids` trains on the softmax over what the sampler kept; `skip_zero_advantage` leaves out sequences without a
    gradient.
    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _Model,
        reward_funcs: _Rewards,
        args: RLOOConfig | None = None,
        train_dataset: _Data | None = None,
        eval_dataset: _EvalData | None = None,
        processing_class: _Processing | None = None,
        reward_processing_classes: _RewardProcessing | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        *,
        share_prefix: _Share = "auto",
        kept_ids: bool = False,
        skip_zero_advantage: _Share = "auto",
        loss: None = None,
        logits_budget: _Budget = None,
    ) -> None: ...

class LigerDistillationTrainer(DistillationTrainer):
    """TRL's `DistillationTrainer` without logits, see docs/trainers.md. `loss` replaces TRL's loss.

    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _Model,
        teacher_model: str | PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: _Processing | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
        *,
        loss: LigerFusedLinearDistillationBase | None = None,
        logits_budget: _Budget = None,
    ) -> None: ...

class LigerGKDTrainer(GKDTrainer):
    """TRL's `GKDTrainer` without logits, see docs/trainers.md. `loss` replaces TRL's loss.

    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _AnyModel | None = None,
        teacher_model: _AnyModel | None = None,
        args: GKDConfig | None = None,
        data_collator: _Collator | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: _AnyProcessing | None = None,
        compute_metrics: _Metrics | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        preprocess_logits_for_metrics: _Preprocess | None = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable[..., Any] | None = None,
        *,
        loss: LigerFusedLinearDistillationBase | None = None,
        logits_budget: _Budget = None,
    ) -> None: ...

class LigerGOLDTrainer(GOLDTrainer):
    """TRL's `GOLDTrainer` without logits, see docs/trainers.md. `loss` replaces TRL's loss.

    `logits_budget` is the most bytes of logits in memory, see `LogitOptions`.
    """

    def __init__(
        self,
        model: _AnyModel | None = None,
        teacher_model: _AnyModel | None = None,
        args: GOLDConfig | None = None,
        data_collator: _Collator | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: _AnyProcessing | None = None,
        compute_metrics: _Metrics | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: _Optimizers = (None, None),
        preprocess_logits_for_metrics: _Preprocess | None = None,
        peft_config: PeftConfig | None = None,
        *,
        loss: LigerFusedLinearDistillationBase | None = None,
        logits_budget: _Budget = None,
    ) -> None: ...
