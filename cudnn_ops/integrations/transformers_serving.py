"""Models of Hugging Face transformers as :class:`cudnn_ops.generation.Engine` calls them.

    model = load_model("path/to/Llama", device="cuda")
    engine = Engine(model, model.cache(pages=4096), max_length=model.max_length)

The model's own code runs, over the packed tokens of all requests as one row with a position for
each. Only attention is another function: it passes a layer's queries, keys and values on to the
engine's ``attend``. No mask is made, so that nothing of a step depends on the values of its inputs,
and decoding is captured in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.integrations.transformers_rotary import fuse_rotary_
from cudnn_ops.nn.replace import replace_modules_
from cudnn_ops.serving import Attend, PagedKVCache

try:
    from transformers import (
        AttentionInterface,
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        PreTrainedModel,
    )
except ImportError as error:
    raise ImportError(
        "cudnn_ops.integrations.transformers_serving needs Hugging Face transformers, 5.17 or "
        f"later: {error}; install it with: pip install 'transformers>=5.17'"
    ) from error

__all__ = ["FAMILIES", "ServedModel", "ServedTokenizer", "load_model", "load_tokenizer"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The kinds of models (``model_type``) that are served."""

# Without a mask function by that name transformers makes no mask.
_IMPLEMENTATION = "cudnn_ops_serving"
# Their angles depend on the longest request of a step.
_REFUSED_ROPES = ("dynamic", "longrope")


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attend: Attend | None = None,
    longest: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' ``AttentionInterface``, of one row of tokens."""
    if attend is None:
        raise ValueError(
            f'{type(module).__name__}: attn_implementation="{_IMPLEMENTATION}" is for models that '
            "an engine calls; model.set_attn_implementation names another one"
        )
    options: dict[str, Any] = {"scale": scaling}
    if sliding_window is not None and sliding_window < longest:
        options["window_size"] = (sliding_window - 1, 0)
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return attend(module.layer_idx, query, key, value, **options)[None], None


class ServedModel:
    """A model of transformers with the signature of :class:`cudnn_ops.generation.Model`.

    The model is changed in place: norms, gated MLPs and rotary embedding become this package's, and
    attention the engine's, so that it can be called in no other way any more.

    Args:
        model: a causal language model of one of the :data:`FAMILIES`.
        max_length: the longest request, in tokens; None stands for the model's
            ``max_position_embeddings``.

    Raises:
        NotImplementedError: another kind of model; quantized weights; a rotary embedding whose
            angles depend on the length (``dynamic``, ``longrope``).
        ValueError: ``max_length`` is less than 1, or more than the model supports.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from cudnn_ops.generation import Engine, SamplingParams
        >>> from cudnn_ops.integrations.transformers_serving import ServedModel
        >>> sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=64, head_dim=16)
        >>> heads = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
        >>> model = ServedModel(LlamaForCausalLM(LlamaConfig(**sizes, **heads)), max_length=64)
        >>> engine = Engine(model, model.cache(pages=8), max_length=model.max_length)
        >>> request = engine.submit([1, 2, 3], SamplingParams(max_tokens=4))
        >>> len(next(engine.run()).output)
        4
    """

    def __init__(self, model: PreTrainedModel, max_length: int | None = None) -> None:
        config = model.config
        _check_config(config)
        most = int(config.max_position_embeddings)
        self.max_length = most if max_length is None else max_length
        """The longest request, prompt and output in tokens."""
        if not 1 <= self.max_length <= most:
            raise ValueError(
                f"max_length must be 1 to {most}, the model's max_position_embeddings, got "
                f"{max_length}"
            )
        replace_modules_(model)
        fuse_rotary_(model)
        AttentionInterface.register(_IMPLEMENTATION, _attention)
        model.set_attn_implementation(_IMPLEMENTATION)
        self.model = model.eval().requires_grad_(False)
        """The model of transformers."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return int(self.model.config.vocab_size)

    def page_bytes(self, page_size: int = 16, dtype: torch.dtype | None = None) -> int:
        """The memory of a page, in bytes, in all layers; ``dtype`` as :meth:`cache` has it."""
        layers, heads, size = self._sizes()
        dtype = dtype or next(self.model.parameters()).dtype
        return 2 * layers * page_size * heads * size * dtype.itemsize

    def cache(
        self, pages: int, page_size: int = 16, dtype: torch.dtype | None = None
    ) -> PagedKVCache:
        """A cache for its keys and values, on its device.

        Args:
            pages: number of pages.
            page_size: tokens in a page.
            dtype: None stands for the model's; ``torch.float8_e4m3fn`` halves it, without scales.
        """
        layers, heads, size = self._sizes()
        weight = next(self.model.parameters())
        sizes = (layers, pages, page_size, heads, size)
        return PagedKVCache(*sizes, dtype=dtype or weight.dtype, device=weight.device)

    def __call__(self, tokens: Tensor, positions: Tensor, last: Tensor, attend: Attend) -> Tensor:
        """The logits of some of the tokens, as :class:`cudnn_ops.generation.Model` says."""
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=last,
            attend=attend,
            longest=self.max_length,
        )
        logits: Tensor = out.logits[0]
        return logits

    def _sizes(self) -> tuple[int, int, int]:
        """Layers, heads of keys, and their size."""
        config = self.model.config
        size = getattr(config, "head_dim", None)
        size = size or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers, config.num_key_value_heads, size


def _read_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        # transformers would take the name for one of a model elsewhere.
        raise FileNotFoundError(
            f"{folder} is no folder of a model of transformers: it has no config.json"
        )
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _check_config(config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise NotImplementedError(
            f"models of the kind {config.model_type!r} are not served, but {', '.join(FAMILIES)}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise NotImplementedError(
            "quantized weights are not served; use the model in float16 or bfloat16"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope in _REFUSED_ROPES:
        raise NotImplementedError(
            f"rotary embedding of the kind {rope!r} is not served, for its angles depend on the "
            "longest request of a step, and so would each output on the others"
        )


def load_model(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    max_length: int | None = None,
) -> ServedModel:
    """Loads a folder of transformers: ``config.json`` and safetensors. Downloads nothing.

    Args:
        folder: as ``save_pretrained`` writes it.
        device: where to compute.
        dtype: of the weights and the cache. None stands for the folder's on a GPU if that is
            float16 or bfloat16, else bfloat16; on a CPU for float32.
        max_length: as in :class:`ServedModel`.

    Raises:
        NotImplementedError: as :class:`ServedModel`, and so is ValueError.
        OSError: the folder has no model.
    """
    config = _read_config(Path(folder))
    _check_config(config)  # before gigabytes are read
    if dtype is None:
        narrow = (torch.float16, torch.bfloat16)
        dtype = config.dtype if config.dtype in narrow else torch.bfloat16
        if torch.device(device).type == "cpu":
            dtype = torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, use_safetensors=True, local_files_only=True
    )
    return ServedModel(model.to(device), max_length)


class ServedTokenizer:
    """A tokenizer of transformers as the server uses it (:class:`cudnn_ops.server.Tokenizer`).

    Args:
        tokenizer: of transformers.
        stop_tokens: what ends an answer.
        chat_template: a Jinja template for conversations; None stands for the tokenizer's own.
    """

    def __init__(
        self, tokenizer: Any, stop_tokens: Sequence[int] = (), chat_template: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.stop_tokens = frozenset(stop_tokens)
        """What ends an answer: the end of the text, and perhaps of a turn."""
        if chat_template is not None:
            tokenizer.chat_template = chat_template

    @property
    def has_chat(self) -> bool:
        """Whether there is a template for conversations."""
        return self._tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with what the tokenizer puts before it."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the answer begins.

        Raises:
            ValueError: there is no template, or it refuses these messages.
        """
        from jinja2 import TemplateError

        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special ones."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def load_tokenizer(folder: str | Path, chat_template: str | None = None) -> ServedTokenizer:
    """Loads the tokenizer of a folder of transformers. Downloads nothing.

    What ends an answer is what ``generation_config.json``, ``config.json`` and the tokenizer name
    as ``eos_token_id``.

    Args:
        folder: as ``save_pretrained`` writes it.
        chat_template: a Jinja template; None stands for the folder's own.

    Raises:
        OSError: the folder has no model, or no tokenizer. Also ValueError, where transformers
            raises it.
    """
    folder = Path(folder)
    config = _read_config(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ends: set[int] = set()
    named = [tokenizer.eos_token_id, config.eos_token_id]
    if (folder / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    for each in named:
        ends.update([each] if isinstance(each, int) else each or [])
    return ServedTokenizer(tokenizer, sorted(ends), chat_template)
