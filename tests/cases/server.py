"""Servers of tiny models: text is bytes, and a token says what follows it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from torch import Tensor

from cudnn_ops import PagedKVCache
from cudnn_ops.generation import Engine
from cudnn_ops.server import AsyncEngine
from cudnn_ops.server.app import create_app
from cudnn_ops.server.running import serve_in_thread

END = 3  # ends an answer
BAD = 7  # the model yields NaN after it
VOCABULARY = 256
NAME = "tiny"
PAGES, PAGE = 64, 8


class Bytes:
    """Text as its bytes in UTF-8; a conversation is its messages, a line each."""

    stop_tokens = frozenset([END])
    has_chat = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise ValueError("the last message must not be the assistant's")
        return self.encode("".join(f"{each['role']}: {each['content']}\n" for each in messages))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token != END).decode(errors="replace")


class TableModel:
    """Stands for a transformer: the last token alone says how likely the next ones are.

    ``a`` follows ``z``, and each other byte the one before it, by far the likeliest; the gate holds
    each step up until it is open.
    """

    def __init__(self, device: str = "cpu") -> None:
        table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        table += 20 * torch.eye(VOCABULARY).roll(1, 1)
        table[ord("z")] = table[ord("a") - 1]
        table[BAD] = torch.nan
        self.table = table.to(device)
        self.gate = threading.Event()
        self.gate.set()
        self.held = threading.Event()
        """Set once a step is held up."""
        self.error: BaseException | None = None
        """Raised once, by the next step."""
        self.free = 0
        """The gate closes once this many more steps have gone through it."""

    def __call__(self, tokens: Tensor, positions: Tensor, last: Tensor, attend: object) -> Tensor:
        if not self.gate.is_set():
            self.held.set()
        assert self.gate.wait(60)
        self.free -= 1
        if self.free == 0:
            self.gate.clear()
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.table[tokens[last]]


@dataclass(frozen=True)
class Tiny:
    """A tiny model, its engine, and the engine for coroutines around it."""

    model: TableModel
    engine: Engine
    serving: AsyncEngine

    def check_pages(self) -> None:
        """No request is left, and no page is held."""
        usage = self.engine.cache.usage()
        assert self.engine.running == self.engine.waiting == self.serving.unfinished == 0
        assert usage.in_use == usage.sequences == 0
        assert usage.free + usage.evictable == self.engine.cache.pages


def make_tiny(pages: int = PAGES, max_waiting: int = 64, **options) -> Tiny:
    model = TableModel()
    cache = PagedKVCache(1, pages, PAGE, 1, 16, dtype=torch.float32, device="cpu")
    options = {"max_batch": 4, "chunk": 64, "max_length": 128} | options
    engine = Engine(model, cache, decode=Bytes().decode, **options)
    serving = AsyncEngine(
        engine, vocabulary=VOCABULARY, decode=Bytes().decode, max_waiting=max_waiting
    )
    return Tiny(model, engine, serving)


@contextmanager
def tiny_server(tiny: Tiny, **options) -> Iterator[httpx.Client]:
    """A client of a server around it."""
    app = create_app(tiny.serving, Bytes(), NAME, **options)
    with serve_in_thread(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def events(lines: Iterator[str]) -> Iterator[dict]:
    """The data of server-sent events, without the one that ends them, which must be there."""
    for line in lines:
        if not line:
            continue
        assert line.startswith("data: ")
        if line == "data: [DONE]":
            return
        yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has no end")


# Folders of transformers

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer(folder: Path, *, chat: bool = True) -> None:
    """One whose tokens are bytes, and two special ones behind them: 256 begins, 257 ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_transformers_model(
    family: str, dtype: torch.dtype = torch.float64, scale: float = 0.4, **options
):
    """A tiny model with random weights, so large that its tokens depend on all before them."""
    import transformers

    sizes = {
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": None,
    }
    config = transformers.AutoConfig.for_model(family, **sizes | options)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, dtype=torch.float64)
            weight.copy_(1 + noise / 4 if weight.dim() == 1 else scale * noise)
    return model.to(dtype).eval()


def write_folder(folder: Path, family: str = "llama", *, chat: bool = True, **options) -> Path:
    """A folder of a tiny model with its tokenizer, as transformers writes them."""
    make_transformers_model(family, torch.float32, **options).save_pretrained(folder)
    write_tokenizer(folder, chat=chat)
    return folder
