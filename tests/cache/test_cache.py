"""A cache has the model's numbers, is small, and refuses what it was not written for; TRL's trainers read it."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from datasets import Dataset
from model_zoo import BY_ID
from spies import flop_counter

from liger_chunked import LigerFusedLinearKLDivLoss, TopK, next_tokens, read_cache, score, teacher_top_k, write_cache
from liger_chunked.cache import TokenCache, model_fingerprint

VOCAB = 131


class Tokenizer:
    """`get_vocab` is all that a cache reads of a tokenizer."""

    def __init__(self, size: int = VOCAB) -> None:
        self.vocab = {f"token {i}": i for i in range(size)}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


@pytest.fixture(scope="module")
def model() -> Any:
    return BY_ID["llama"].build().eval()


def sequences(n: int = 7) -> list[dict[str, list[int]]]:
    """Return sequences of uneven lengths, the last ones with a prompt that is not predicted, and one of one token."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(n):
        ids = torch.randint(10, 120, (1 + 3 * i % 8,), generator=generator).tolist()
        rows.append({"input_ids": ids} if i < 3 else {"input_ids": ids, "labels": [-100] * 2 + ids[2:]})
    return rows


def test_a_reference_cache_has_the_scores(model: Any, tmp_path: Path) -> None:
    rows = sequences()
    cache = write_cache(tmp_path / "a.parquet", model, rows, tokenizer=Tokenizer(), temperature=0.7, batch_size=3)
    assert len(cache) == len(rows) and sorted(os.listdir(tmp_path)) == ["a.parquet"]
    for row, found in zip(rows, cache, strict=True):
        ids = torch.tensor([row["input_ids"]])
        alone = {"input_ids": ids, "labels": torch.tensor([row.get("labels", row["input_ids"])])}
        expected = score(model, alone, ("logps", "lse"), temperature=0.7)
        # float32 products of a padded batch, beside those of one sequence: the order of their sums differs.
        torch.testing.assert_close(found["logps"], expected.logps[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["lse"], expected.lse[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(found["input_ids"], ids[0]) and torch.equal(found["labels"], alone["labels"][0])
    batch = cache.collate([cache[i] for i in (1, 5)], pad_token_id=9)
    assert batch["ref_logps"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert batch["input_ids"][0, -1] == 9 and batch["labels"][0, -1] == -100


def test_a_teachers_cache_is_its_top_k_in_a_shuffled_loader(model: Any, tmp_path: Path) -> None:
    rows = sequences()
    path = tmp_path / "teacher.parquet"
    write_cache(path, model, Dataset.from_list(rows[:3]), tokenizer=None, k=5, temperature=2.0, vocab_size=120)
    cache = read_cache(path, temperature=2, tokenizer=None, vocab_size=120, model=model)
    loader = DataLoader(cache, batch_size=2, shuffle=True, collate_fn=cache.collate, num_workers=1)
    seen = 0
    for batch in loader:
        online = teacher_top_k(model, {x: batch[x] for x in ("input_ids", "attention_mask", "labels")}, 5,
                               temperature=2.0, vocab_size=120)  # fmt: skip
        counts = next_tokens(batch) != -100
        # float32 products of other batches: the order of their sums differs.
        torch.testing.assert_close(batch["teacher"].logps[counts], online.logps[counts], rtol=1e-5, atol=1e-5)
        assert torch.equal(batch["teacher"].ids[counts], online.ids[counts])
        assert (batch["teacher"].logps[~counts] == -torch.inf).all() and batch["teacher"].temperature == 2.0
        seen += len(batch["input_ids"])
    assert seen == 3


@pytest.mark.parametrize("k", [0, 8])
def test_costs_one_product_with_each_predicted_token(k: int, tmp_path: Path) -> None:
    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.head(self.embedding(input_ids))

    with flop_counter() as flops:
        cache = write_cache(tmp_path / "a.parquet", Embeddings(), sequences(), tokenizer=None, k=k)
    predicted = sum(int((next_tokens({"labels": row["labels"][None]}) != -100).sum()) for row in cache)
    assert flops.get_total_flops() == predicted * 2 * 16 * VOCAB


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temperature": 2.0}, "written with temperature 1.0, but 2.0 is asked for"),
        ({"tokenizer": Tokenizer(VOCAB - 1)}, "written with tokenizer"),
        ({"tokenizer": None}, "written with tokenizer"),
        ({"vocab_size": VOCAB + 1}, "written with vocab_size 131, but 132"),
        ({"model": BY_ID["llama"].build(seed=1)}, "written with model"),
    ],
)
def test_another_purpose_is_refused(model: Any, tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.parquet"
    write_cache(path, model, sequences(), tokenizer=Tokenizer())
    fitting = {"temperature": 1.0, "tokenizer": Tokenizer(), "vocab_size": VOCAB, "model": model}
    read_cache(path, **fitting)
    with pytest.raises(ValueError, match=message):
        read_cache(path, **fitting | asked)


def test_every_update_changes_the_fingerprint(model: Any) -> None:
    before = model_fingerprint(model)
    assert before == model_fingerprint(BY_ID["llama"].build())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
        assert model_fingerprint(model) != before
        model.model.layers[1].mlp.up_proj.weight.div_(1.001)


def test_a_damaged_file_is_noticed(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"input_ids": torch.randint(10, 120, (200,))} for _ in range(8)]
    write_cache(path, model, rows, tokenizer=None, k=8)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="was cut off"):
        TokenCache(path)
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ValueError, match="was changed or cut off"):
        list(TokenCache(path))
    Dataset.from_list(sequences(2)).to_parquet(path)
    with pytest.raises(ValueError, match="no file of write_cache"):
        TokenCache(path)


def test_a_run_that_ends_early_leaves_no_cache(model: Any, tmp_path: Path) -> None:
    def until_it_fails() -> Any:
        yield from sequences(9)
        raise RuntimeError("the power went out")

    path = tmp_path / "a.parquet"
    path.write_text("before")
    with pytest.raises(RuntimeError, match="the power went out"):
        write_cache(path, model, until_it_fails(), tokenizer=None, batch_size=4)
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a.parquet"]
    with pytest.raises(ValueError, match="data has no sequence"):
        write_cache(path, model, [], tokenizer=None)
    with pytest.raises(ValueError, match=r"a sequence of data needs input_ids \(T,\)"):
        write_cache(path, model, [{"input_ids": [[1, 2]]}], tokenizer=None)


def test_64_tokens_of_a_large_vocabulary_take_at_most_512_bytes(tmp_path: Path) -> None:
    """Of random logits, whose ids and mantissas do not compress: real ones take less."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 151_936)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            noise = torch.randn(*input_ids.shape, 8, generator=torch.Generator().manual_seed(0))
            return self.head(self.embedding(input_ids) + noise)

    rows = [{"input_ids": torch.randint(64, (101,))} for _ in range(4)]
    path = tmp_path / "a.parquet"
    write_cache(path, Teacher(), rows, tokenizer=None, k=64)
    assert path.stat().st_size / 400 <= 512


def test_the_file_is_plain_parquet_and_the_cache_can_be_pickled(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    cache = write_cache(path, model, sequences(), tokenizer=Tokenizer(), k=4)
    table = Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "datasets"))
    assert table.column_names == ["input_ids", "labels", "lse", "top_ids", "top_logps"] and len(table) == len(cache)
    assert table[2]["input_ids"] == sequences()[2]["input_ids"]
    again = pickle.loads(pickle.dumps(cache))
    assert again.info == cache.info and torch.equal(again[4]["top_ids"], cache[4]["top_ids"])
    assert json.loads(json.dumps(vars(cache.info)))["k"] == 4


def test_a_cached_top_k_keeps_its_temperature(tmp_path: Path, model: Any) -> None:
    cache = write_cache(tmp_path / "a.parquet", model, sequences(), tokenizer=None, k=4, temperature=2.0)
    batch = cache.collate(list(cache), tail="renormalize")
    assert isinstance(batch["teacher"], TopK) and batch["teacher"].tail == "renormalize"
    with pytest.raises(ValueError, match=r"at temperature 2\.0, the loss has temperature=1\.0"):
        LigerFusedLinearKLDivLoss()(
            torch.randn(VOCAB, 8), torch.randn(*batch["labels"].shape, 8), target=next_tokens(batch),
            teacher=batch["teacher"],
        )  # fmt: skip
